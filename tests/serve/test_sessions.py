"""Named sessions make way to their files and come back to the same entries, whatever ends the server."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import Alone, Client, run, small, text
from families import tiny

from kvkeep import KeepCache, SessionError, UsageError
from kvkeep.decode import session_file
from kvkeep.decode.cached_text import CachedText
from kvkeep.decode.session import load_session, request_of
from kvkeep.blocks.store import Store
from kvkeep.engine import scheduler as schedulers
from kvkeep.engine.batch import Batch
from kvkeep.errors import KvkeepError, SessionBusy, SessionDamaged
from kvkeep.serve import session_pool
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import OpenSession

PLENTY = 10**9
NEW = 6
METHODS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "kv-direct", "budget": 24, "chunk": 16},
    *({"method": name, "budget": 24, "chunk": 16} for name in ("h2o", "snapkv", "window+merge", "snapkv+verified")),
    *({"method": name, "budget": 60, "chunk": 16} for name in ("revive", "kvzip", "kvreviver")),
]


def serving(folder: Path, memory: int = PLENTY, family: str = "llama", **limits: Any) -> Engine:
    store = Store(folder, **limits)
    return Engine(small(family), memory, store=store)


def turns(number: int, count: int = 3) -> list[list[int]]:
    """What is new of each prompt of a conversation."""
    return [text(40 if turn == 0 else 14, 100 * number + turn) for turn in range(count)]


def alone(parts: list[list[int]], cache: dict[str, Any]) -> list[list[int]]:
    """The answers of a conversation that has a cache to itself."""
    own, ids, answers = Alone(small(), **cache), list[int](), []
    for part in parts:
        ids = [*ids, *part]
        answers.append(own.answer(ids, NEW))
        ids += answers[-1]
    return answers


def told(engine: Engine, ids: list[int], name: str, new: int = NEW, **cache: Any) -> Client:
    client = Client(engine, ids, new, name=("me", name), **cache)
    run(engine)
    return client


def test_many_sessions_in_memory_for_few_answer_as_alone_and_are_never_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are measured in the middle of every pass, at every layer, with the keys and values in hand; and logits."""
    count, kinds = 12, itertools.cycle(METHODS)
    cache = [next(kinds) for _ in range(count)]
    largest = max(
        OpenSession(None, CachedText(KeepCache(tiny("llama"), **kind))).peak_bytes(40 + 2 * 14 + 3 * NEW)
        for kind in METHODS
    )
    engine = serving(tmp_path / "s", int(1.5 * largest))
    measured: list[int] = []
    real = Batch.update

    def update(batch: Batch, keys: Any, values: Any, *given: Any, **named: Any) -> Any:
        waiting = sum(one.memory_bytes for one in engine.sessions.memory.values())
        logits = len(batch.sessions) * engine.geometry.vocab_size * 4  # at most one token's each
        measured.append(waiting + keys.nbytes + values.nbytes + logits)
        return real(batch, keys, values, *given, **named)

    monkeypatch.setattr(Batch, "update", update)
    parts, ids = [turns(number) for number in range(count)], [list[int]() for _ in range(count)]
    found: list[list[list[int]]] = [[] for _ in range(count)]
    for turn in range(3):
        clients = []
        for number in range(count):
            ids[number] += parts[number][turn]
            kind = {} if turn else cache[number]
            clients.append(Client(engine, ids[number], NEW, name=("me", str(number)), **kind))
        engine._stopping = True
        while engine.step():
            assert sum(one.memory_bytes for one in engine.sessions.memory.values()) <= engine.arbiter.total
        engine._stopping = False
        for number, client in enumerate(clients):
            assert turn == 0 or client.ended.cached >= len(ids[number]) - len(parts[number][turn]) - 1, cache[number]
            ids[number] += client.ended.tokens
            found[number].append([*client.ended.tokens])
    print(max(measured), engine.arbiter.total)
    assert engine.arbiter.total // 2 < max(measured) <= engine.arbiter.total  # a limit that is used
    assert engine.sessions.parked > count and engine.sessions.storage.restored > count
    for number in range(count):
        assert found[number] == alone(parts[number], cache[number]), cache[number]
    engine.close()
    assert not any(info.held or info.problem for info in engine.sessions.storage.store.sessions("me"))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [METHODS[0], METHODS[2]])
def test_another_server_goes_on_with_a_folder_but_not_while_the_first_has_the_session(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    parts = turns(1)
    first, second = serving(tmp_path), serving(tmp_path)
    one = told(first, parts[0], "talk", **kind)
    ids = [*parts[0], *one.ended.tokens, *parts[1]]
    busy = told(second, ids, "talk")
    assert isinstance(busy.events[-1], SessionBusy) and "in use by another program" in str(busy.events[-1])
    cut = Client(first, ids, 50, name=("me", "talk"))
    while len(cut.job.answer.tokens if cut.job.answer else ()) < 3:
        first.step()
    cut.job.cancel()  # as SIGTERM does
    run(first)
    assert cut.ended.reason == "cancelled" and cut.ended.cached > 0
    first.close()
    other = told(second, ids, "talk", method="tova", budget=99)
    assert isinstance(other.events[-1], UsageError) and "cannot be changed" in str(other.events[-1])
    ids += [*cut.ended.tokens, *parts[2]]
    last = told(second, ids, "talk", **kind)
    assert last.ended.cached >= len(ids) - len(parts[2]) - 1
    second.close()
    unbroken = serving(tmp_path / "unbroken")
    for prompt, new in ((parts[0], NEW), ([*parts[0], *one.ended.tokens, *parts[1]], cut.ended.written), (ids, NEW)):
        same = told(unbroken, prompt, "talk", new, **kind)
    assert same.ended.tokens == last.ended.tokens
    unbroken.close()


@pytest.mark.parametrize("spoilt", ["journal", "page", "content"])
def test_a_damaged_session_is_read_anew_and_its_file_kept(
    spoilt: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts, kind = turns(2), METHODS[2]
    engine = serving(tmp_path)
    one = told(engine, parts[0], "talk", **kind)
    engine.close()
    path = tmp_path / "me" / "talk.session"
    data = bytearray(path.read_bytes())
    if spoilt == "content":
        with session_file.SessionFile(path, writing=True) as file:
            tensors = {name: file.tensor(name) for name in file.stored}
            file.save(tensors | {"session.ids": torch.zeros(1, 3, dtype=torch.int32)}, file.about)
    else:
        data[len(data) // 2 if spoilt == "page" else 9] ^= 1
        path.write_bytes(data)
    engine = serving(tmp_path)
    ids = [*parts[0], *one.ended.tokens, *parts[1]]
    two = told(engine, ids, "talk", **kind)
    assert two.ended.cached == 0 and [*two.ended.tokens] == alone([ids], kind)[0]
    assert "read anew" in engine.sessions.facts("me")["talk"]["note"] and "damaged" in caplog.text
    three = told(engine, [*ids, *two.ended.tokens, *parts[2]], "talk")
    assert three.ended.cached > 0
    engine.close()
    assert {info.name for info in Store(tmp_path).sessions()} == {"me/talk", "me/talk.damaged-1"}


def test_a_turn_that_cannot_be_saved_is_answered_and_the_next_save_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, parts = serving(tmp_path), turns(3)
    one = told(engine, parts[0], "talk", method="h2o", budget=24, chunk=16)
    ids = [*parts[0], *one.ended.tokens, *parts[1]]

    def full(*given: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(session_file.Writer, "commit", full)
        two = told(engine, ids, "talk")
    assert "no space left" in engine.sessions.facts("me")["talk"]["note"]
    ids = [*ids, *two.ended.tokens, *parts[2]]
    three = told(engine, ids, "talk")
    assert three.ended.cached > 0 and engine.sessions.facts("me")["talk"]["note"] is None
    engine.close()
    again = told(later := serving(tmp_path), [*ids, *three.ended.tokens, 5], "talk")
    assert again.ended.read <= 2
    later.close()


def test_a_session_with_an_unsaved_turn_makes_way_last_and_once_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, parts, kind = serving(tmp_path), turns(3), METHODS[2]

    def full(*given: Any) -> Any:
        raise OSError(28, "No space left on device")

    def note() -> Any:
        return engine.sessions.facts("me")["talk"]["note"]

    with monkeypatch.context() as patch:
        patch.setattr(session_file.Writer, "_begin", full)  # no file can be made
        one = told(engine, parts[0], "talk", **kind)
        assert one.ended.written == NEW and "'talk': no space left" in note()
        ids = [*parts[0], *one.ended.tokens, *parts[1]]
        two = told(engine, ids, "talk")
        assert two.ended.cached > 0 and not [*tmp_path.rglob("*.session")]
    ids += [*two.ended.tokens, *parts[2]]
    told(engine, text(20, 9), "other")
    first, last = engine.sessions.idle()
    assert (first.key[1], last.key[1]) == ("other", "talk")
    engine.sessions.park(last)
    assert Store(tmp_path).info("me/talk").turns == 1
    three = told(engine, ids, "talk")
    answers = [[*client.ended.tokens] for client in (one, two, three)]
    assert three.ended.cached > len(parts[0]) and answers == alone(parts, kind) and note() is None
    with monkeypatch.context() as patch:
        patch.setattr(session_file.Writer, "commit", full)
        four = told(engine, [*ids, *three.ended.tokens, 5], "talk")
        engine.sessions.park(last := engine.sessions.memory[("me", "talk")])
    assert four.ended.written == NEW and last.unsaved and "without its last turn" in caplog.text
    assert "lost when the session was evicted" in note()
    told(engine, [*ids, *three.ended.tokens, 5], "talk")
    assert "lost when the session was evicted" in note()  # as long as it is in memory
    engine.close()


def test_a_slow_disk_holds_up_nobody_else_and_turns_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, real = serving(tmp_path), session_file.Writer.commit

    def slow(*given: Any) -> None:
        time.sleep(0.3)
        real(*given)

    monkeypatch.setattr(session_file.Writer, "commit", slow)
    other = Client(engine, text(30, 1), 400)
    one = Client(engine, text(40, 2), 2, name=("me", "talk"))
    two = Client(engine, text(50, 2), 2, name=("me", "talk"))  # of the same session
    written = []
    while not (two.events and one.events):
        engine.step()
        if engine._saving:
            written.append(len(other.job.answer.tokens) if other.job.answer else 0)
    assert written[-1] - written[0] > 1  # while turns were written
    assert engine.sessions.memory[("me", "talk")].turns >= 1
    run(engine)
    assert one.ended.cached == 0 and two.ended.written == 2
    assert engine.sessions.memory[("me", "talk")].turns == 2
    engine.close()


def test_an_answer_that_fails_leaves_the_session_as_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, parts = serving(tmp_path), turns(4)
    one = told(engine, parts[0], "talk", method="h2o", budget=24, chunk=16)
    ids = [*parts[0], *one.ended.tokens, *parts[1]]
    with monkeypatch.context() as patch:
        patch.setattr(CachedText, "recover", lambda past, known: past.cache.reset())  # the worst that may be
        patch.setattr(schedulers, "forward", lambda model, reads: [RuntimeError("out of luck")] * len(reads))
        bad = told(engine, ids, "talk")
    assert "(RuntimeError)" in str(bad.events[-1])
    two = told(engine, ids, "talk")
    assert two.ended.cached > 0 and [[*one.ended.tokens], [*two.ended.tokens]] == alone(
        parts[:2], {"method": "h2o", "budget": 24, "chunk": 16}
    )
    engine.close()


def test_what_cannot_be_a_session_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    engine = serving(tmp_path, memory=200_000)
    for name in ("../talk", "a/b", "", "x.session", "x" * 101):
        with pytest.raises(UsageError, match="cannot be the name"):
            Client(engine, text(20, 1), name=("me", name))
    with pytest.raises(UsageError, match="Unknown method 'magic'"):
        told(engine, text(20, 1), "talk", method="magic")
    large = told(engine, text(400, 1), "talk", method="full")
    assert isinstance(large.events[-1], UsageError)
    assert not engine.sessions.memory and not [*tmp_path.rglob("*.session")]
    told(engine, text(20, 1), "talk", method="full")
    engine.close()
    other = serving(tmp_path, family="gpt2")
    refused = told(other, text(20, 1), "talk")
    assert isinstance(refused.events[-1], SessionError) and "another model" in str(refused.events[-1])
    other.close()
    assert len([*tmp_path.rglob("*.session")]) == 1


def test_quota_and_age_are_kept_but_never_against_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_pool, "EVICTION_INTERVAL_S", 0.0)
    engine = serving(tmp_path, quota=150_000)
    for number in range(5):
        told(engine, text(60, number), str(number), method="full")
        time.sleep(0.02)
    for _ in range(3):  # one to look, one to remove what is over
        run(engine)
    kept = Store(tmp_path).sessions()
    left = {info.name for info in kept}
    assert "me/4" in left and "me/0" not in left and sum(info.bytes for info in kept) <= 150_000
    assert {f"me/{name}" for _, name in engine.sessions.memory} == left  # what may stay in the folder does in memory
    monkeypatch.setattr(session_pool, "EVICTION_INTERVAL_S", 10**9)
    engine.close()
    old = serving(tmp_path, age=0.0)
    monkeypatch.setattr(session_pool, "EVICTION_INTERVAL_S", 0.0)
    client = told(old, text(60, 9), "9", method="full")
    assert client.ended.written == NEW
    for _ in range(3):
        run(old)
    assert not [*tmp_path.rglob("*.session")]
    old.close()


# -- a folder that several servers share ------------------------------------------------------------------


def closing_slowly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let files be closed slowly; how many closes each one began beside, itself included."""
    real, under_way, found = session_file.SessionFile.close, list[Any](), list[int]()

    def close(file: session_file.SessionFile) -> None:
        under_way.append(file)
        found.append(len(under_way))
        time.sleep(0.05)
        real(file)
        under_way.remove(file)

    monkeypatch.setattr(session_file.SessionFile, "close", close)
    return found


def refused(engine: Engine, ids: list[int], how: str, monkeypatch: pytest.MonkeyPatch) -> Client:
    """An answer of a session that is not going to be given, so far that it may be refused with the next step."""
    sessions, key = engine.sessions, ("me", "talk")
    if how == "of another kind":
        return Client(engine, ids, name=key, method="tova", budget=99)
    if how == "too large":
        return Client(engine, ids, 10**8, name=key)
    if how == "fails":
        forward, recover = schedulers.forward, CachedText.recover

        def fail(model: Any, reads: list[Any]) -> list[Any]:
            cache = sessions.memory[key].cache if key in sessions.memory else None
            found, own = forward(model, reads), [read.cache is cache for read in reads]
            if any(own):
                monkeypatch.setattr(schedulers, "forward", forward)
            return [RuntimeError("no luck") if mine else one for mine, one in zip(own, found, strict=True)]

        def reset(past: CachedText, known: list[int]) -> None:  # the worst that may be
            monkeypatch.setattr(CachedText, "recover", recover)
            past.cache.reset()

        monkeypatch.setattr(schedulers, "forward", fail)
        monkeypatch.setattr(CachedText, "recover", reset)
        return Client(engine, ids, name=key)
    with monkeypatch.context() as patch:
        patch.setattr(engine.arbiter, "grants", lambda *given: False)
        client = Client(engine, ids, name=key)
        while key not in sessions.memory or not sessions.memory[key].exclusive:
            engine.step()
    engine._admission._refused = None
    client.job.cancel()
    return client


@pytest.mark.parametrize("limit", [{"quota": 1}, {"age": 0.0}])
def test_what_has_no_file_is_not_of_the_folder(
    limit: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_pool, "EVICTION_INTERVAL_S", 0.0)
    engine = serving(tmp_path, **limit)
    ids = text(64, 1)
    one = Client(engine, ids, method="full")
    told(engine, text(40, 2), "talk", method="full")
    for _ in range(3):
        run(engine)
    assert ("me", "talk") not in engine.sessions.memory and not [*tmp_path.rglob("*.session")]
    two = Client(engine, [*ids, *one.ended.tokens, 5], method="full")
    run(engine)
    assert two.ended.cached == len(ids) + one.ended.written - 1
    engine.close()


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("how", ["of another kind", "too large", "is cancelled", "fails"])
def test_an_answer_that_is_refused_costs_the_next_one_nothing(
    how: str, away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits already, the session is away or in memory, and a third one writes, so that steps do not wait
    for files."""
    engine, parts, kind = serving(tmp_path, shared=True), turns(2), METHODS[0]
    one = told(engine, parts[0], "talk", **kind)
    if away:
        engine.close()
        engine = serving(tmp_path, shared=True)
    closing_slowly(monkeypatch)
    Client(engine, text(30, 9), 120)
    engine.step()
    ids = [*parts[0], *one.ended.tokens, *parts[1]]
    bad, two = refused(engine, ids, how, monkeypatch), Client(engine, ids, NEW, name=("me", "talk"))
    run(engine)
    assert not bad.events[-1].written if how == "is cancelled" else isinstance(bad.events[-1], KvkeepError)
    assert two.ended.cached == len(ids) - len(parts[1]) - 1
    assert [[*one.ended.tokens], [*two.ended.tokens]] == alone(parts[:2], kind)
    assert engine.sessions.facts("me")["talk"]["note"] is None
    (info,) = Store(tmp_path, shared=True).sessions()
    assert (info.name, info.turns, info.held, info.problem) == ("me/talk", 2, False, None)
    engine.close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["talk.session"]


def test_a_file_that_is_being_closed_is_not_closed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, parts = serving(tmp_path, shared=True), turns(1)
    told(engine, parts[0], "talk", **METHODS[0])
    begun = closing_slowly(monkeypatch)
    Client(engine, text(30, 9), 200)
    engine.step()
    refused(engine, parts[0], "of another kind", monkeypatch)
    while not begun:
        engine.step()
    assert engine.sessions.drop(("me", "talk"))
    Store(tmp_path, shared=True).remove("me/talk")
    engine.close()
    assert len(begun) > 1 and {*begun} == {1}


def test_a_closed_file_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    engine, path = serving(tmp_path), tmp_path / "me" / "talk.session"
    told(engine, text(20, 1), "talk", method="full")
    engine.close()
    with session_file.SessionFile(path, writing=True) as file:
        cache = KeepCache(tiny("llama"), request=request_of(file, tiny("llama")))
    with pytest.raises(SessionError, match="closed while it was read; retry") as error:
        load_session(file, tiny("llama"), cache=cache)
    assert not isinstance(error.value, SessionDamaged)
