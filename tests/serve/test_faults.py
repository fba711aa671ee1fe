"""A fault of one session ends no other one, and only the engine's thread runs the model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import NEW, Client, run, text
from conftest import tokenizer
from families import tiny

import kvkeep
from kvkeep import KeepCache
from kvkeep.blocks.folder import BlockFolder
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.engine.answer import Ask
from kvkeep.engine.pieces import TextPiece
from kvkeep.errors import KvkeepError, OutOfMemory
from kvkeep.models.adapter import decoder_of, layers_of
from kvkeep.models.loading import Loaded
from kvkeep.passes.hooks import ForwardHooks
from kvkeep.policies.registry import register, unregister
from kvkeep.policies.selectors.h2o import H2O as HeavyHitters
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import Event

H2O: dict[str, Any] = {"method": "h2o", "budget": 24, "chunk": 16}


def fresh() -> Any:
    """A model that no cache was made for."""
    return tiny.__wrapped__("llama")


def serving(model: Any = None, folder: Path | None = None, **limits: Any) -> Engine:
    store = None if folder is None else Store(folder, **limits)
    return Engine(Loaded(model or tiny("llama"), tokenizer(), "tiny", "tiny"), 10**9, store=store)


def alone(ids: list[int], new: int = NEW, **cache: Any) -> list[int]:
    return kvkeep.generate(
        tiny("llama"), tokenizer(), ids, KeepCache(tiny("llama"), **cache), max_new_tokens=new
    ).tokens


def noting(function: Callable[..., Any], threads: set[int]) -> Callable[..., Any]:
    def noted(*given: Any, **own: Any) -> Any:
        threads.add(threading.get_ident())
        return function(*given, **own)

    return noted


@dataclass(frozen=True)
class Measuring(HeavyHitters):
    """Runs the model when a cache is made."""

    def budgets(self, model: Any, geometry: Any, entries: int) -> list[Sequence[int]]:
        if model is not None:
            model(torch.tensor([[1, 2]]), use_cache=False)
        return super().budgets(model, geometry, entries)


def test_the_engines_thread_alone_runs_the_model_and_makes_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a method that measures the model when a cache is made, for a session that is new, and for one that comes
    back; the store is read elsewhere."""
    ran, made, read = set[int](), set[int](), set[int]()
    monkeypatch.setattr(KeepCache, "__init__", noting(KeepCache.__init__, made))
    monkeypatch.setattr(BlockFolder, "read", noting(BlockFolder.read, read))
    ids, kind = text(40, 1), {"method": "measuring", "budget": 24, "chunk": 16}
    register("measuring", Measuring)
    for turn in range(2):
        model = fresh()  # nothing is measured of it
        model.register_forward_pre_hook(lambda *_: ran.add(threading.get_ident()))
        engine = serving(model, tmp_path)
        client = Client(engine, ids, name=("me", "talk"), **kind)
        run(engine)
        assert (client.ended.cached > 0) == (turn > 0)
        ids = [*ids, *client.ended.tokens, *text(10, 2)]
        engine.close()
    unregister("measuring", Measuring)
    assert ran == made == {threading.get_ident()} and read and not read & made


@pytest.mark.parametrize("heard", [0, 1, 99])
def test_a_listener_that_fails_ends_its_own_answer_alone(heard: int, tmp_path: Path) -> None:
    """At the first piece, at a later one, and at the end, with a session's turn saved."""
    engine, events = serving(folder=tmp_path), list[Event]()

    def listener(event: Event) -> None:
        if len(events) == heard or not isinstance(event, TextPiece):
            raise RuntimeError("Event loop is closed")
        events.append(event)

    good = Client(engine, text(40, 1), 12, **H2O)
    job = engine.submit(Ask(text(40, 2), 12), listener, name=("me", "bad"), **H2O)
    run(engine)
    assert [*good.ended.tokens] == alone(text(40, 1), 12, **H2O)
    assert all(isinstance(event, TextPiece) for event in events) and job.cancelled and not engine.running
    session = engine.sessions.memory[("me", "bad")]
    assert not session.busy and (len(session.past.ids) < 51) == (heard < 99)  # it ended at once
    again = Client(engine, text(40, 2), 12, name=("me", "bad"))
    run(engine)
    assert [*again.ended.tokens] == alone(text(40, 2), 12, **H2O)
    engine.close()


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (MemoryError(), "begin"),
        (torch.OutOfMemoryError("x"), "layer"),
        (RuntimeError("can't allocate memory"), "head"),
    ],
)
def test_a_pass_that_finds_no_memory_fails_those_answers_alone_that_cannot_be_read_again(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = serving(), {"method": "kv-direct", "budget": 24, "checkpoint": "tokens"}
    kinds: list[dict[str, Any]] = [{"method": "full"}, H2O, {"method": "snapkv+verified", "budget": 24, "chunk": 16}]
    clients = [Client(engine, text(40, seed), 12, name=("me", str(seed)), **kind) for seed, kind in enumerate(kinds)]
    apart = Client(engine, text(40, 9), 12, **tokens)  # reads by itself
    while not all(client.job.writes for client in clients):
        engine.step()

    def failing(*_: Any) -> None:
        raise error

    assert len(engine.running) == 4
    with monkeypatch.context() as patch:
        if place == "begin":
            own = ForwardHooks._plan
            patch.setattr(
                ForwardHooks, "_plan", lambda hooks, *given: (failing if hooks.packed else own)(hooks, *given)
            )
        else:
            model = engine.model
            module = layers_of(decoder_of(model))[2].mlp if place == "layer" else model.get_output_embeddings()
            once = module.register_forward_pre_hook(lambda *_: (once.remove(), failing()))
        engine.step()
    failed = [client for client in clients if isinstance(client.events[-1], KvkeepError)]
    assert failed == (clients if place == "begin" else clients[1:])  # there every pass fails
    for client in failed:
        assert isinstance(client.events[-1], OutOfMemory)
        assert "The server ran out of memory while answering (40 tokens of prompt)" in str(client.events[-1])
    run(engine)
    if clients[0] not in failed:
        assert [*clients[0].ended.tokens] == alone(text(40, 0), 12, method="full")
    assert [*apart.ended.tokens] == alone(text(40, 9), 12, **tokens)
    again = [Client(engine, text(40, seed), 12, name=("me", str(seed))) for seed in range(3)]
    run(engine)
    for seed, (client, kind) in enumerate(zip(again, kinds, strict=True)):
        assert [*client.ended.tokens] == alone(text(40, seed), 12, **kind)


@pytest.mark.parametrize("error", [torch.AcceleratorError("lost"), TypeError("a mistake")])
def test_what_is_no_sessions_fault_ends_the_engine(error: Exception) -> None:
    engine = serving(fresh())
    Client(engine, text(40, 1))

    def failing(*_: Any) -> None:
        raise error

    engine.model.get_output_embeddings().register_forward_pre_hook(failing)
    with pytest.raises(type(error)):
        run(engine)


def test_an_answer_whose_turn_is_being_saved_when_the_engine_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, save = serving(folder=tmp_path), StoredSession.save
    end = engine._save

    def fail(*given: Any) -> None:
        end(*given)
        raise TypeError("a mistake")

    monkeypatch.setattr(StoredSession, "save", lambda *given, **own: (time.sleep(0.1), save(*given, **own)))
    monkeypatch.setattr(engine, "_save", fail)
    client = Client(engine, text(40, 1), name=("me", "talk"), **H2O)
    engine.start()
    engine.join()
    assert isinstance(engine.fault, TypeError) and client.ended.written == NEW
    (info,) = Store(tmp_path).sessions()
    assert (info.saves, info.in_use) == (1, False)


def test_who_comes_as_the_engine_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request and a stop come while a step looks whether anything is left."""
    engine, late = serving(), list[Client]()

    class Inbox(queue.SimpleQueue[Any]):
        def empty(self) -> bool:
            found = super().empty()
            if not late:
                late.append(Client(engine, text(20, 1), 2))
                engine.stopping = True
            return found

    engine._inbox = Inbox()
    for _ in range(20):
        if not engine.step():
            break
    assert late[0].ended.written == 2
