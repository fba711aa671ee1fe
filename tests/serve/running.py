"""A server that runs, for tests: in a thread of this process, or as a program of its own."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import forked
import httpx
import uvicorn
from answering import small

from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.app import application
from kvkeep.serve.http.connection import uvicorn_config

ASK = [{"role": "user", "content": "the river and the stone"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 4, "temperature": 0}
KEYS = ["first-key", "second-key"]
LOOP = "event-loop"
"""The name of the thread in which a server's event loop runs."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


# -- servers ----------------------------------------------------------------------------------------------


@contextmanager
def serving(
    keys: list[str] = KEYS, tls: dict[str, Any] | None = None, engine: Engine | None = None, **options: Any
) -> Iterator[tuple[str, Engine]]:
    """The address and the engine of a server in this process, by default of a tiny model; the engine ends with it."""
    engine = engine or Engine(small(), 10**8)
    loaded = Loaded(engine.model, engine.tokenizer, "tiny", "tiny")
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that slow readers are noticed early
    server = uvicorn.Server(uvicorn_config(application(engine, loaded, keys, **options), **(tls or {})))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name=LOOP, daemon=True)
    engine.start()
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}", engine
    finally:
        server.should_exit = True
        engine.stop(0)
        thread.join(10)


@contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """An engine that does not take a step until the event is set, or to the end."""
    gate, there = threading.Event(), threading.Event()
    engine.call(lambda: (there.set(), gate.wait(60)))
    assert there.wait(10)
    try:
        yield gate
    finally:
        gate.set()


@contextmanager
def crowded(engine: Engine) -> Iterator[None]:
    """An engine without memory for any answer, until the block ends."""
    grants, admission = engine.arbiter.grants, engine._admission

    def opened() -> None:
        del engine.arbiter.grants
        admission._refused = None

    engine.arbiter.grants = lambda *given: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.call(opened).result(60)
        assert engine.arbiter.grants == grants


@dataclass
class Program:
    """``kvkeep serve`` as a process, and what it calls its model."""

    process: subprocess.Popen[Any]
    address: str
    model: str
    _errors: IO[str]

    def processor_s(self) -> float:
        """Seconds of processor time that it has taken, as Linux counts them."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self, reset: bool = False) -> float:
        """The most memory that it had since the last reset, which this call may be, in MB."""
        if reset:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1e3

    def said(self) -> str:
        """What it has written on standard error."""
        self._errors.seek(0)
        return self._errors.read()


@contextmanager
def program(
    *options: str,
    keys: list[str] = KEYS,
    fork: bool = False,
    before: Callable[[], None] = lambda: None,
    limit: Callable[[], None] | None = None,
) -> Iterator[Program]:
    """``kvkeep serve`` with these options, once it is ready; it is killed at the end. fork: it begins in an interpreter
    that has imported what it needs, in a second instead of ten. before: what a forked one does first. limit: what
    another one does."""
    port = _free_port()
    arguments = ["serve", *options, "--port", str(port)]
    environment = {**os.environ, "KVKEEP_API_KEYS": ",".join(keys)}
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    with tempfile.TemporaryFile("w+") as errors:
        if fork:
            serve = forked.kvkeep(*arguments)
            process = forked.started(lambda: (before(), serve()), env=environment, stderr=errors)
        else:
            command = [sys.executable, "-m", "kvkeep", *arguments]
            process = subprocess.Popen(command, env=environment, stderr=errors, preexec_fn=limit)
        running = Program(process, address, "", errors)
        try:
            while not _ready(address):
                assert process.poll() is None and time.monotonic() < deadline, running.said()
                time.sleep(0.05)
            running.model = httpx.get(f"{address}/v1/models", headers=bearer(*keys[:1])).json()["data"][0]["id"]
            yield running
        finally:
            process.kill()
            process.wait()


def _free_port() -> int:
    """A free port that no system gives to a program which asks for any port: those of a Ray cluster do, and would take
    it before the server does."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randint(20_000, 32_767))) as one:
            port: int = one.getsockname()[1]
            return port


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(
            f"{address}/ready", timeout=30
        ) as found:  # httpx would take 20 ms of processor time
            return bool(found.status == 200)
    except OSError:
        return False


# -- clients ----------------------------------------------------------------------------------------------


def bearer(key: str = KEYS[0]) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def post(address: str, body: Any, key: str = KEYS[0], path: str = CHAT) -> httpx.Response:
    """Send an object, or the bytes of one."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = bearer(key) | {"Content-Type": "application/json"}
    return httpx.post(address + path, headers=headers, timeout=60, **given)


def streamed(address: str, body: dict[str, Any], path: str = CHAT, timeout: float = 30) -> Any:
    given = {"json": {**body, "stream": True}, "headers": bearer(), "timeout": timeout}
    return httpx.stream("POST", address + path, **given)


@contextmanager
def raw(address: str, body: dict[str, Any], path: str = CHAT) -> Iterator[socket.socket]:
    """A request by hand, of a client whose own buffer is small."""
    host, _, port = address.removeprefix("http://").partition(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect((host, int(port)))
        one.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        yield one


def counting(model: str, number: int, new: int) -> dict[str, Any]:
    """A request that the real model answers with so many tokens, and does not end before."""
    first = ", ".join(str(100 * number + place) for place in range(1, 6))
    return {"model": model, "prompt": f"Numbers: {first},", "max_tokens": new, "temperature": 0}


def figures(address: str, key: str = KEYS[0]) -> dict[str, float]:
    """What /metrics says, by name and labels."""
    text = httpx.get(f"{address}/metrics", headers=bearer(key), timeout=30).text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()
