"""What the worst requests cost everybody else: the longest time of ``/health``, processor time and memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from running import Program, bearer, figures, program, within
from worst_bodies import REFUSED, TAKEN, TOKENIZE, Worst, text

OPTIONS = ("--memory", "500MB", "-x", "full", "--private")
ASKING = """
import http.client, signal, sys, time
longest, ended = 0.0, []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
print("begun", flush=True)
while not ended or not longest:
    time.sleep(0.01)
    begun = time.perf_counter()
    one = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
    one.request("GET", "/health")
    assert one.getresponse().status == 200
    longest = max(longest, time.perf_counter() - begun)
print(longest)
"""
"""A program that asks for ``/health`` until SIGTERM, at least once, and then says the longest time that it took."""


@contextmanager
def asking(running: Program) -> Iterator[list[float]]:
    """Ask for ``/health`` in the block, in a process of its own; the list gets the longest time in seconds."""
    command, longest = [sys.executable, "-c", ASKING, running.address.rpartition(":")[2]], [0.0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        try:
            yield longest
        finally:
            process.terminate()
            longest[0] = float(process.stdout.read())


def sent(running: Program, worst: Worst, given: bytes) -> int:
    """Send a body, and return the status of its response; 0 if the connection was closed."""
    headers = bearer() | {"Content-Type": "application/json"}
    try:
        return httpx.post(running.address + worst.path, content=given, headers=headers, timeout=300).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.real
@pytest.mark.soak(12)
def test_the_worst_bodies_cost_little_and_stop_nobody(say: Any) -> None:
    rows = list[tuple[str, float, float, float]]()
    with program(*OPTIONS) as running:
        sent(running, TAKEN["words"], TAKEN["words"].make(running.model, 1000))
        for kind, worst in [*REFUSED.items(), *((f"{name}, taken", one) for name, one in TAKEN.items())]:
            given = worst.make(running.model, worst.size)
            tries = list[tuple[float, float, float]]()
            while len(tries) < 3 and (not tries or tries[-1][0] > 0.2):  # others delay a try
                before, seconds = running.peak_mb(reset=True), running.processor_s()
                with asking(running) as longest:
                    assert sent(running, worst, given) in (worst.status, 0), kind
                tries.append((longest[0], running.processor_s() - seconds, running.peak_mb() - before))
            wait, seconds, grown = min(tries)
            rows.append((kind, seconds, wait, grown))
            say.progress(f"{kind}: {rows[-1][1]:.2f} s, /health {1e3 * wait:.0f} ms, {grown:+.0f} MB")
    refused = rows[: len(REFUSED)]
    assert max(row[1] for row in refused) < 1.5 and max(row[2] for row in rows) < 0.2, rows
    say(
        f"{len(REFUSED)} wrong bodies of up to 8 MB: at most {max(row[1] for row in refused):.2f} s of processor time "
        f"and {max(row[3] for row in refused):.0f} MB; {len(TAKEN)} of the largest that are answered: "
        f"{max(row[1] for row in rows):.1f} s, {max(row[3] for row in rows):.0f} MB; beside each, /health took at most "
        f"{1e3 * max(row[2] for row in rows):.0f} ms"
    )


@pytest.mark.real
@pytest.mark.soak(13)
def test_sixty_four_large_bodies_at_once_take_bounded_memory(say: Any) -> None:
    given, seen = text("\n")("smollm2", 8 * 10**6 - 1000), Counter[int]()
    with program(*OPTIONS) as running:
        before = running.peak_mb(reset=True)
        threads = [
            threading.Thread(target=lambda: seen.update([sent(running, Worst(TOKENIZE, 200, text("\n")), given)]))
            for _ in range(64)
        ]
        with asking(running) as longest:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        grown = running.peak_mb() - before
        assert within(60, lambda: figures(running.address)["kvkeep_request_bytes"] == 0)
    assert {*seen} <= {200, 503, 0} and seen[200] and grown < 1500, (seen, grown)
    counts = ", ".join(f"{count} × {status or 'closed'}" for status, count in sorted(seen.items()))
    say(f"64 clients with 8 MB at once: {counts}; {grown:+.0f} MB at most; /health at most {1e3 * longest[0]:.0f} ms")
