"""Answers begin in order, once their memory is granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answering import Client, alone, run, small, text
from families import tiny

from kvkeep import KeepCache
from kvkeep.errors import BudgetError, QueueFull
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import OpenSession, peak_bytes


def serving(memory: int) -> Engine:
    return Engine(small("llama"), memory)


def test_memory_is_granted_before_an_answer_begins_and_idle_sessions_make_way() -> None:
    cache: dict[str, Any] = {"method": "h2o", "budget": 16, "chunk": 16}
    one = peak_bytes(KeepCache(tiny("llama"), **cache), 48)
    engine = serving(memory=int(2.5 * one))
    clients = [Client(engine, text(40, seed), name=("me", str(seed)), **cache) for seed in range(6)]
    least = 0
    engine.stopping = True
    while engine.step():
        now = sum(session.past.cache.memory().bytes for session in engine.sessions.memory.values())
        least = max(least, now)
        assert now <= engine.arbiter.total and len(engine.running) <= 2
    assert least > one // 2  # it is a limit that is used
    for seed, client in enumerate(clients):
        assert [*client.ended.tokens] == alone("llama", text(40, seed), **cache)
    tight = serving(memory=one // 2)
    client = Client(tight, text(40, 1), **cache)
    run(tight)
    (error,) = client.events
    assert isinstance(error, BudgetError) and "more --memory" in str(error)


def counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def called(*given: Any, **own: Any) -> Any:
        calls.append(1)
        return function(*given, **own)

    return called


def test_who_waits_for_memory_costs_no_step_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its cache nor what others hold is looked at again, until somebody leaves."""
    cache: dict[str, Any] = {"method": "h2o", "budget": 16, "chunk": 16}
    engine, made, asked = serving(memory=int(1.5 * peak_bytes(KeepCache(tiny("llama"), **cache), 60))), [], []
    clients = [Client(engine, text(40, seed), 20, **cache) for seed in range(3)]
    for kind, name, calls in ((KeepCache, "__init__", made), (OpenSession, "peak_bytes", asked)):
        monkeypatch.setattr(kind, name, counted(getattr(kind, name), calls))
    run(engine)
    assert len(made) == 3 and len(asked) <= 6  # each at its arrival, and when it begins
    for seed, client in enumerate(clients):
        assert [*client.ended.tokens] == alone("llama", text(40, seed), 20, **cache)


def test_as_many_wait_as_may_and_nobody_is_refused_who_need_not_wait() -> None:
    cache: dict[str, Any] = {"method": "h2o", "budget": 16, "chunk": 16}
    engine = Engine(small("llama"), int(3.5 * peak_bytes(KeepCache(tiny("llama"), **cache), 48)), waiting=2)
    clients = []
    for seed in range(5):
        clients.append(Client(engine, text(40, seed), **cache))
        engine.step()
    assert len(engine.running) == 3 and engine.waiting == 2
    with pytest.raises(QueueFull, match="The queue is full \\(2 requests\\); retry"):
        Client(engine, text(40, 9), **cache)
    run(engine)
    for seed, client in enumerate(clients):
        assert [*client.ended.tokens] == alone("llama", text(40, seed), **cache)
    again = Client(engine, text(40, 9), **cache)
    run(engine)
    assert again.ended.written
