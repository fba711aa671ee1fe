"""One server process beside two replicas with one thread each, and what a kill costs (the numbers of docs/replicas.md).

python tools/replicas_pace.py [ROUNDS]
python tools/replicas_pace.py --update     # counts what clients notice of an update of two replicas, and no times

Both servers run at the same time and answer in turns, so that other work on the machine meets both: read the ratio,
not the numbers. Then a replica is killed (SIGKILL) in the middle of its answers. Needs the extra ``ray``, the package
``openai``, and Linux (for the processes in /proc).
"""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

MODEL, SESSIONS, READ, WRITTEN = "smollm2", 8, 256, 64
METHOD = ("-x", "full", "--memory", "600MB")


def started(folder: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    """Start ``kvkeep serve``."""
    own = {**os.environ, "KVKEEP_API_KEYS": "key", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvkeep", "serve", "-m", MODEL, *METHOD, "--port", str(port)]
    return subprocess.Popen([*command, "--sessions", folder, *options], env=own)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextmanager
def server(folder: str, *options: str) -> Iterator[tuple[str, int]]:
    """Run ``kvkeep serve``; yield its address and process."""
    process = started(folder, port := free_port(), *options)
    try:
        while process.poll() is None and not ready(f"http://127.0.0.1:{port}/ready"):
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        process.terminate()
        process.wait()


def ready(address: str) -> bool:
    """Return whether a server takes requests."""
    try:
        with urllib.request.urlopen(address, timeout=5) as found:
            return bool(found.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def below(process: int) -> dict[int, float]:
    """Return processes below one, itself included, and the seconds of processor time of each."""
    parents, spent = dict[int, int](), dict[int, float]()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.name)] = int(fields[1])
            spent[int(path.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_below(number: int) -> bool:
        return number == process or (number in parents and is_below(parents[number]))

    return {number: own for number, own in spent.items() if is_below(number)}


def replicas(process: int) -> list[int]:
    """Return the processes of replicas below one."""
    return [one for one in below(process) if b"ServeReplica" in Path(f"/proc/{one}/cmdline").read_bytes()]


class Client:
    """A session's client: numbers that nobody has sent before, and an answer of a fixed length."""

    def __init__(self, address: str, name: str) -> None:
        self.api = OpenAI(base_url=address, api_key="key", max_retries=0, timeout=600)
        self.name, self.ids, self.cached = name, random.Random(name).choices(range(1000, 20000), k=READ), 0
        self.failed = self.first = 0.0
        self.written, self.error = 0, Exception()

    def ask(self, ids: list[int], new: int) -> None:
        """Ask, and take the times of an error and of the first piece."""
        own: dict[str, Any] = {"extra_body": {"kvkeep": {"session": self.name}}}
        self.failed = self.first = 0.0
        try:
            for event in self.api.completions.create(
                model=MODEL, prompt=ids, max_tokens=new, temperature=0, stream=True,
                stream_options={"include_usage": True}, **own,
            ):  # fmt: skip
                self.first = self.first or time.monotonic()
                if event.usage is not None:
                    self.cached = event.usage.prompt_tokens_details.cached_tokens
                    self.written = event.usage.completion_tokens
        except APIError as error:
            self.failed, self.error = time.monotonic(), error


def together(clients: list[Client], new: int) -> threading.Thread:
    """Let all ask at once."""

    def run() -> None:
        threads = [threading.Thread(target=one.ask, args=(one.ids, new)) for one in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    whole = threading.Thread(target=run)
    whole.start()
    return whole


class Counts:
    """What clients notice, each of which talks in a session of its own until ``ended`` is set."""

    def __init__(self, address: str) -> None:
        self.address, self.ended = address, threading.Event()
        self.turns = self.errors = self.again = 0
        self.lock = threading.Lock()

    def talk(self, name: str) -> None:
        """Ask turn after turn; a turn is read again if fewer tokens are cached than the one before had asked for."""
        client, known = Client(self.address, name), 0
        numbers = random.Random(name)
        while not self.ended.is_set():
            client.ask(client.ids, 8)
            with self.lock:
                self.turns += 1
                self.errors += bool(client.failed)
                self.again += not client.failed and client.cached < known
            if not client.failed:
                known = len(client.ids)
                client.ids = [*client.ids, *numbers.choices(range(1000, 20000), k=8)]


def update() -> None:
    """Have two replicas replaced while four clients talk, and print counts."""
    from kvkeep_cluster import ray_cluster
    from kvkeep_cluster.replicas import ENVIRONMENT

    with tempfile.TemporaryDirectory() as folder, ray_cluster.connected(None, 2, environment=ENVIRONMENT):
        import ray

        cluster = ray.get_runtime_context().gcs_address
        options = ("--replicas", "2", "--cores", "1", "--ray", cluster)
        port = free_port()
        if started(folder, port, *options).wait():
            sys.exit("The replicas did not start.")
        before = set(replicas(os.getpid()))
        counts = Counts(f"http://127.0.0.1:{port}/v1")
        threads = [threading.Thread(target=counts.talk, args=(f"talk-{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        failed = started(folder, port, *options, "--waiting", "63").wait()
        time.sleep(5)
        counts.ended.set()
        for thread in threads:
            thread.join()
        after = set(replicas(os.getpid()))
        if failed or len(after) != 2 or before & after:
            sys.exit(f"There was no update: {before} became {after}.")
    print(f"update: {counts.turns} turns of 4 clients, {counts.errors} errors, {counts.again} turns read again")


def main() -> None:
    """Measure, and print."""
    if sys.argv[1:] == ["--update"]:
        update()
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        two, process = stack.enter_context(server(folders[1], "--replicas", "2", "--cores", "1"))
        one, single = stack.enter_context(server(folders[0]))
        pace: dict[str, list[float]] = {one: [], two: []}
        written, began = dict.fromkeys(pace, 0), {address: dict[int, float]() for address in pace}
        for number in range(rounds + 1):
            for address, whole in ((one, single), (two, process)):
                clients = [Client(address, f"{number}-{talk}") for talk in range(SESSIONS)]
                if number == 1:  # the first round reads the model's pages
                    began[address] = below(whole)
                start = time.monotonic()
                together(clients, WRITTEN).join()
                if any(client.failed for client in clients):
                    sys.exit(f"An answer failed: {next(client.error for client in clients if client.failed)}")
                if number:
                    tokens = sum(client.written for client in clients)
                    pace[address].append(tokens / (time.monotonic() - start))
                    written[address] += tokens
        print(f"{SESSIONS} sessions of {READ} tokens read, {WRITTEN} written, {rounds} rounds, tokens/s of answers")
        for name, address, whole in (("one process", one, single), ("two replicas", two, process)):
            took = {number: own - began[address].get(number, 0) for number, own in below(whole).items()}
            each = [1000 * took[number] / written[address] for number in replicas(whole) or [whole]]
            rest = 1000 * sum(took.values()) / written[address] - sum(each)
            spent = " + ".join(f"{own:.1f}" for own in each)
            print(f"  {name}: median {statistics.median(pace[address]):.1f}, most {max(pace[address]):.1f}", end="")
            print(f"; processor time {spent} ms a token, Ray's own {rest:.1f}")
        ratios = [b / a for a, b in zip(pace[one], pace[two], strict=True)]
        print(f"  ratio: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")

        clients = [Client(two, f"kill-{talk}") for talk in range(SESSIONS)]
        together(clients, WRITTEN).join()
        for client in clients:
            client.ids, client.first = [*client.ids, *range(2000, 2032)], 0.0
        running = together(clients, 600)
        while not all(client.first for client in clients):
            time.sleep(0.01)
        killed = time.monotonic()
        os.kill(replicas(process)[0], signal.SIGKILL)
        moved = []
        while running.is_alive() and not moved:
            time.sleep(0.005)
            moved = [client for client in clients if client.failed]
        time.sleep(0.2)
        moved = [client for client in clients if client.failed]
        told = max(client.failed for client in moved) - killed
        together(moved, 8).join()
        first = sorted(client.first - killed for client in moved)
        print(
            f"kill: {len(moved)} of {SESSIONS} answers lost; told after {told:.2f} s; first token of the moved sessions"
        )
        cached = [one.cached for one in moved]
        print(f"  {first[0]:.2f} to {first[-1]:.2f} s after the kill; cached {cached} of {READ + 32}")
        while len(replicas(process)) < 2:
            time.sleep(0.1)
        running.join()
        print(f"  another replica's process {time.monotonic() - killed:.1f} s after the kill")


if __name__ == "__main__":
    main()
