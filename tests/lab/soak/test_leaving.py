"""Clients that disconnect, and slow clients: others are not affected, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from weakref import WeakSet

import httpx
import pytest
from answering import small
from kvkeep_lab.process_memory import current_process_memory
from running import BODY, TEXT, Program, bearer, counting, figures, post, program, raw, serving, within

from kvkeep import KeepCache
from kvkeep.blocks.store import Store
from kvkeep.engine import answer as scheduling
from kvkeep.engine.answer import Answer, Scheduler
from kvkeep.serve.engine import Engine
from kvkeep.serve.http import answer_events
from kvkeep.serve.http.answer_events import AnswerEvents, Limits
from kvkeep.serve.session import Job, peak_bytes

LONG = {**BODY, "messages": [{"role": "user", "content": "the river " * 120}], "max_tokens": 200}
SHORT = {**BODY, "max_tokens": 400}
SESSIONS = 5


class Leaving:
    """Where answers were when their clients left, how many steps they kept their rows for, and how they ended."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places, self.reasons, self.steps = Counter[str](), Counter[str](), list[int]()
        self._count, self._left, self._over = 0, dict[Job, int](), WeakSet[Job]()
        self._rows = WeakSet[Job]()
        step, cancel, halt, end = engine.step, Job.cancel, Job.halt, Job.end

        def counted(wait: bool = False) -> bool:
            self._count += 1
            return step(wait)

        def cancelled(job: Job) -> None:
            if not job.cancelled and job not in self._over:
                self._left[job] = self._count
                if job.answer is not None:  # else its session's file is read first
                    self._rows.add(job)
                place = "queue" if job.answer is None else "answer" if job.writes else "prompt"
                self.places[place] += 1
            cancel(job)

        def halted(job: Job, scheduler: Scheduler) -> Answer:  # its row is free; its turn is saved before it ends
            if job in self._rows:
                self.steps.append(self._count - self._left[job])
            return halt(job, scheduler)

        def ended(job: Job, last: Any) -> None:
            if self._left.pop(job, None) is not None:
                self.reasons[getattr(last, "reason", f"{last}")] += 1
            self._over.add(job)
            end(job, last)

        monkeypatch.setattr(engine, "step", counted)
        monkeypatch.setattr(Job, "cancel", cancelled)
        monkeypatch.setattr(Job, "halt", halted)
        monkeypatch.setattr(Job, "end", ended)


@pytest.mark.parametrize("cycles", [12, pytest.param(1000, marks=pytest.mark.soak(5))])
def test_clients_that_disconnect_leave_nothing_behind(
    cycles: int, say: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two at a time in memory for one answer, so that the second waits."""
    before = objects()  # other tests'
    monkeypatch.setattr(scheduling, "CHUNK", 4)  # a prompt of sixty steps
    for name in ("FIRST_EVENT_TIMEOUT_S", "PROGRESS_S"):  # also streams without a first token are left
        monkeypatch.setattr(answer_events, name, 60.0)
    engine = Engine(small(), int(1.2 * peak_bytes(KeepCache(small().model, "full"), 512)), store=Store(tmp_path))
    limits = Limits(answers=64)
    left = Leaving(engine, monkeypatch)
    with serving(engine=engine, limits=limits) as (address, _):
        wanted = post(address, BODY).json()["choices"]
        warm = None

        def reading() -> bool:
            return any(job.answer is not None for job in engine.running)

        def writing() -> bool:
            return any(job.writes for job in engine.running)

        def waiting() -> bool:  # unless the first had its whole answer meanwhile
            return bool(engine._admission.waiting) or not writing()

        for number in range(2 * cycles):  # an answer may end before its client leaves
            if left.places.total() >= cycles:
                break
            first = {**(LONG if number % 2 else SHORT), "stream": number % 4 < 2}
            second = {**SHORT, "stream": number % 3 == 0}
            first["kvkeep"] = {"session": f"talk-{number % SESSIONS}"} if number % 5 < 3 else {}
            second["kvkeep"] = {"session": f"wait-{number % SESSIONS}"} if number % 7 < 3 else {}
            with raw(address, first) as one:
                assert within(20, writing if number % 2 == 0 else reading)
                with raw(address, second):
                    assert within(20, waiting)
                if first["stream"] and not number % 2:
                    assert one.recv(16)
            assert within(20, lambda: not engine.running and not engine.waiting), number
            if number == min(cycles // 6, 50):
                warm = standing()
            if number % 50 == 49:
                say.progress(f"{left.places.total()} of {cycles} left")
        assert warm is not None and within(10, lambda: not limits.running)
        for name in httpx.get(f"{address}/v1/sessions", headers=bearer()).json()["data"]:
            assert httpx.delete(f"{address}/v1/sessions/{name['name']}", headers=bearer()).status_code == 200
        assert post(address, BODY).json()["choices"] == wanted
        assert within(10, lambda: not engine.running and not limits.running)
        counted = figures(address)
        pool = warm[0] + (os.cpu_count() or 1) + 4  # asyncio's own threads, which it makes one by one
        assert within(5, lambda: standing()[1] <= warm[1]) and standing()[0] <= pool, (standing(), warm)
        engine.call(engine.sessions.close).result()
        assert not objects() - before, (objects(), before)
        grown = (standing()[2] - warm[2]) / 1e6
    Store(tmp_path).remove_unused()  # texts without a session's name, whose answer ended before the client left
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files <= {"kvkeep-store", "bytes"}, files  # the store's own
    cancelled = int(counted['kvkeep_requests_ended_total{reason="cancelled"}'])
    assert left.reasons.total() == left.places.total() >= cycles and len(left.places) == 3, left.places
    assert left.reasons["cancelled"] == cancelled and {*left.reasons} <= {"cancelled", "length"}, left.reasons
    assert max(left.steps) <= 2 and grown < 8, (Counter(left.steps), grown)
    places = ", ".join(f"{count} in {place}" for place, count in sorted(left.places.items()))
    say(
        f"{cancelled} clients left ({places}), their rows free after {max(left.steps)} steps at most; no answer, "
        f"cache, file, thread or handle of theirs is left, process {grown:+.1f} MB since the first hundred"
    )


def standing() -> tuple[int, int, int]:
    """Threads, handles and bytes of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd")), current_process_memory().anonymous


def objects() -> Counter[str]:
    """What answers are made of, as far as it is still there."""
    gc.collect()
    kinds = {Job, Answer, AnswerEvents, KeepCache}
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)


# -- slow clients -----------------------------------------------------------------------------------------

MEASURED, TOKENS, SLOW, ENDLESS, ROUNDS = 4, 48, 2, 20, 7


@pytest.mark.real
@pytest.mark.soak(6)
def test_slow_clients_do_not_slow_others(say: Any, tmp_path: Path) -> None:
    """Both halves of a round write as many answers; in one half some readers are slow."""
    options = ["--memory", "500MB", "-x", "h2o", "-b", "128", "--sessions", str(tmp_path)]
    ratios, read = list[float](), list[int]()
    with program(*options) as running:
        asyncio.run(gaps(running, MEASURED, SLOW))
        for number in range(ROUNDS):
            p95 = {}
            for slow in (number % 2 == 0, number % 2 == 1):
                with ExitStack() as stack:
                    if slow:
                        stack.enter_context(slow_clients(running, read))
                    found = asyncio.run(gaps(running, MEASURED, 0 if slow else SLOW))
                p95[slow] = quantiles(found, n=20)[-1]
                assert within(60, lambda: not figures(running.address)["kvkeep_requests_running"])
            ratios.append(p95[True] / p95[False])
            say.progress(f"round {number + 1} of {ROUNDS}: {ratios[-1]:.2f} ×")
    assert median(ratios) <= 1.2, ratios
    say(
        f"{SLOW} readers of a byte a second and {ENDLESS} headers that never end beside {MEASURED} answers: their 95th "
        f"percentile between tokens is {median(ratios):.2f} × that beside {SLOW} readers that keep up, the median of "
        f"{ROUNDS} rounds ({min(ratios):.2f} to {max(ratios):.2f}); the slow ones had read {max(read)} bytes at most"
    )


async def gaps(running: Program, count: int, more: int) -> list[float]:
    """Seconds between the tokens of ``count`` answers at once, with ``more`` beside them, from when all are written."""

    async def one(client: httpx.AsyncClient, number: int) -> list[float]:
        times = []
        async with client.stream("POST", running.address + TEXT, json=body(running, number)) as found:
            async for line in found.aiter_lines():
                if line.startswith("data: {") and '"text":""' not in line:
                    times.append(time.perf_counter())
        return times

    async with httpx.AsyncClient(headers=bearer(), timeout=120) as client:
        every = await asyncio.gather(*(one(client, number) for number in range(count + more)))
    begun = max(times[0] for times in every)
    return [after - before for times in every[:count] for before, after in pairwise(times) if before >= begun]


def body(running: Program, number: int) -> dict[str, Any]:
    """What is asked for; who is beside those that are measured is so until they end."""
    return {**counting(running.model, number, TOKENS if number < MEASURED else 2 * TOKENS), "stream": True}


@contextmanager
def slow_clients(running: Program, read: list[int]) -> Iterator[None]:
    """Readers of a byte a second, and headers of a byte a second, for the block; ``read`` gets what each has read."""
    over, threads = threading.Event(), list[threading.Thread]()
    host, _, port = running.address.removeprefix("http://").partition(":")

    def reads(one: socket.socket) -> None:
        count = 0
        with suppress(OSError):
            while not over.wait(1):
                count += len(one.recv(1))
        read.append(count)

    def asks() -> None:
        with suppress(OSError), socket.create_connection((host, int(port))) as one:
            one.sendall(b"GET /v1/models HTTP/1.1\r\nX-")
            while not over.wait(1):
                one.sendall(b"a")

    with ExitStack() as stack:
        for number in range(SLOW):
            reader = stack.enter_context(raw(running.address, body(running, MEASURED + number), TEXT))
            threads.append(threading.Thread(target=reads, args=(reader,)))
        threads += [threading.Thread(target=asks) for _ in range(ENDLESS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.mark.real
@pytest.mark.soak(14)
def test_thirty_who_read_nothing_do_not_slow_others(say: Any) -> None:
    """Both halves of a round write the same answers beside those that are measured; in one half nobody reads them."""
    ratios, beside = list[float](), 30
    with program("--memory", "2GB", "-x", "h2o", "-b", "128", "--private") as running:
        asyncio.run(gaps(running, MEASURED, 2))
        before = running.peak_mb(reset=True)
        for number in range(3):
            p95 = {}
            for slow in (number % 2 == 0, number % 2 == 1):
                with ExitStack() as stack:
                    for reader in range(beside):
                        asked = counting(running.model, MEASURED + reader, 2000) | {"logprobs": 20, "stream": True}
                        one = stack.enter_context(raw(running.address, asked, TEXT))
                        if not slow:
                            threading.Thread(target=drained, args=(one,), daemon=True).start()
                    assert within(120, lambda: figures(running.address)["kvkeep_requests_running"] == beside)
                    p95[slow] = quantiles(asyncio.run(gaps(running, MEASURED, 0)), n=20)[-1]
                    assert figures(running.address)["kvkeep_requests_running"] == beside, "they wrote all the time"
                assert within(120, lambda: not figures(running.address)["kvkeep_requests_running"])
            ratios.append(p95[True] / p95[False])
            say.progress(f"round {number + 1} of 3: {ratios[-1]:.2f} ×")
        grown = running.peak_mb() - before
    assert median(ratios) <= 1.2 and grown < 500, (ratios, grown)
    say(
        f"{beside} readers of nothing, with 20 log-probabilities a token, beside {MEASURED} answers: their 95th "
        f"percentile between tokens is {median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f}) that beside "
        f"{beside} readers that keep up, {grown:+.0f} MB"
    )


def drained(one: socket.socket) -> None:
    """Read all that is sent, until the connection is closed."""
    with suppress(OSError):
        while one.recv(1 << 16):
            pass
