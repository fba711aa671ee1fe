"""A server that runs, for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from conftest import tokenizer
from families import tiny

from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.app import application
from kvkeep.serve.http.connection import configured
from kvkeep.serve.http.keys import Keys

ASK = [{"role": "user", "content": "the river and the stone"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 4, "temperature": 0}
KEYS = ["first-key", "second-key"]


@contextmanager
def serving(keys: list[str] = KEYS, tls: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[str, Engine]]:
    """A running server's address and engine."""
    loaded = Loaded(tiny("llama"), tokenizer(), "tiny", "tiny")
    engine = Engine(loaded, 10**8)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that slow readers are noticed early
    server = uvicorn.Server(configured(application(engine, loaded, Keys(keys), **options), **(tls or {})))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
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
    engine.call(lambda: (there.set(), gate.wait(30)))
    assert there.wait(10)
    try:
        yield gate
    finally:
        gate.set()


def bearer(key: str = KEYS[0]) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def post(address: str, body: Any, key: str = KEYS[0]) -> httpx.Response:
    return httpx.post(f"{address}/v1/chat/completions", json=body, headers=bearer(key), timeout=30)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()
