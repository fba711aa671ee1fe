"""Named sessions make way to their files and come back to the same entries, whatever ends the server."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from answering import Alone, Client, run, small, text
from families import tiny

from kvkeep import KeepCache, UsageError
from kvkeep.blocks import references
from kvkeep.blocks.references import Reference
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.decode.cached_text import CachedText
from kvkeep.engine import answer as scheduling
from kvkeep.engine.batch import Batch
from kvkeep.errors import KvkeepError, SessionBusy
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


def full(*given: Any, **own: Any) -> Any:
    """A write to a full disk."""
    raise OSError(28, "No space left on device")


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


@pytest.mark.slow
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
        engine.stopping = True
        while engine.step():
            assert sum(one.memory_bytes for one in engine.sessions.memory.values()) <= engine.arbiter.total
        engine.stopping = False
        for number, client in enumerate(clients):
            assert turn == 0 or client.ended.cached >= len(ids[number]) - len(parts[number][turn]) - 1, cache[number]
            ids[number] += client.ended.tokens
            found[number].append([*client.ended.tokens])
    assert engine.arbiter.total // 2 < max(measured) <= engine.arbiter.total  # a limit that is used
    counts = engine.sessions.storage.counts
    assert counts["parked"] > count and counts["restored"] > count
    for number in range(count):
        assert found[number] == alone(parts[number], cache[number]), cache[number]
    engine.close()
    assert not any(info.in_use or info.problem for info in engine.sessions.storage.store.sessions("me"))  # type: ignore[union-attr]


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


def spoil(path: Path, place: int = -1) -> None:
    """Change a byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoilt", ["reference", "content", "block", "block lost"])
def test_a_damaged_session_is_read_anew_and_says_so(
    spoilt: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts, kind = turns(2), METHODS[2]
    engine = serving(tmp_path)
    one = told(engine, parts[0], "talk", **kind)
    engine.close()
    (reference,), (block,) = tmp_path.rglob("*.json"), tmp_path.rglob("*.block")
    if spoilt == "reference":
        spoil(reference, 9)
    elif spoilt == "content":
        about = json.loads(reference.read_bytes().splitlines()[0])
        about["ids"] = [[0, 0, 0]]
        with Store(tmp_path).open("me/talk") as opened:
            opened.commit(about)
    elif spoilt == "block":
        spoil(block)
    else:
        block.unlink()
    engine = serving(tmp_path)
    ids = [*parts[0], *one.ended.tokens, *parts[1]]
    two = told(engine, ids, "talk", **kind)
    assert two.ended.cached == 0 and [*two.ended.tokens] == alone([ids], kind)[0]
    note = engine.sessions.facts("me")["talk"]["note"]
    if spoilt in ("reference", "content"):
        assert "read anew" in note and "damaged-1" in note and "me/talk.damaged-1" in caplog.text
    else:
        assert "read again" in note and str(tmp_path) not in note
        assert "A part of the session 'me/talk' is read again:" in caplog.text
    three = told(engine, [*ids, *two.ended.tokens, *parts[2]], "talk")
    assert three.ended.cached > 0
    engine.close()
    aside = {"me/talk.damaged-1"} if spoilt in ("reference", "content") else set()
    assert {info.name for info in Store(tmp_path).sessions()} == {"me/talk"} | aside


def test_a_session_with_an_unsaved_turn_makes_way_last_and_once_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, parts, kind = serving(tmp_path), turns(3), METHODS[2]

    def note() -> Any:
        return engine.sessions.facts("me")["talk"]["note"]

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", full)
        one = told(engine, parts[0], "talk", **kind)
        assert one.ended.written == NEW and "'talk' cannot be saved: no space left" in note()
        ids = [*parts[0], *one.ended.tokens, *parts[1]]
        two = told(engine, ids, "talk")
        assert two.ended.cached > 0 and not [*tmp_path.rglob("*.session")]
    ids += [*two.ended.tokens, *parts[2]]
    told(engine, text(20, 9), "other")
    first, last = engine.sessions.in_order_of_eviction()
    assert (first.key[1], last.key[1]) == ("other", "talk")
    engine.sessions.park(last)
    assert Store(tmp_path).info("me/talk").saves == 1
    three = told(engine, ids, "talk")
    answers = [[*client.ended.tokens] for client in (one, two, three)]
    assert three.ended.cached > len(parts[0]) and answers == alone(parts, kind) and note() is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
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
    engine, real = serving(tmp_path), Reference.commit

    def slow(*given: Any) -> None:
        time.sleep(0.3)
        real(*given)

    monkeypatch.setattr(Reference, "commit", slow)
    other = Client(engine, text(30, 1), 400)
    one = Client(engine, text(40, 2), 2, name=("me", "talk"))
    two = Client(engine, text(50, 2), 2, name=("me", "talk"))  # of the same session
    written = []
    while not (two.events and one.events):
        engine.step()
        if engine._saving:
            written.append(len(other.job.answer.tokens) if other.job.answer else 0)
    assert written[-1] - written[0] > 1  # while turns were written
    stored = engine.sessions.memory[("me", "talk")].stored
    assert stored is not None and stored.saves >= 1
    run(engine)
    assert one.ended.cached == 0 and two.ended.written == 2
    assert stored.saves == 2
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
    ids, cached = text(20, 1), 0
    for _ in range(2):
        anew = told(other, ids, "talk")
        assert anew.ended.cached == cached
        ids, cached = [*ids, *anew.ended.tokens, 5], 20 + NEW - 1
        facts = other.sessions.facts("me")["talk"]
        assert "read anew" in facts["note"] and "another model" in facts["note"] and facts["saves"] >= 2
    other.close()
    assert len([*tmp_path.rglob("*.session")]) == 1


def test_quota_and_age_are_kept_but_never_against_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_pool, "EVICTION_INTERVAL_S", 0.0)
    engine, quota = serving(tmp_path, quota=150_000), 150_000
    for number in range(5):
        told(engine, text(60, number), str(number), method="full")
        time.sleep(0.02)
        assert 0 < Store(tmp_path).blocks.count()[1] <= quota
    engine.close()
    engine = serving(tmp_path, quota=quota)
    for number, cached in ((4, 60 + NEW - 1), (0, 0)):  # the oldest made way: it is read again
        ids = [*text(60, number), *alone([text(60, number)], {"method": "full"})[0], 5]
        assert told(engine, ids, str(number)).ended.cached == cached, number
        assert Store(tmp_path).blocks.count()[1] <= quota
    monkeypatch.setattr(session_pool, "EVICTION_INTERVAL_S", 10**9)
    engine.close()
    old = serving(tmp_path, age=0.0)
    monkeypatch.setattr(session_pool, "EVICTION_INTERVAL_S", 0.0)
    client = told(old, text(60, 9), "9", method="full")
    assert client.ended.written == NEW
    for _ in range(3):
        run(old)
    assert not [*tmp_path.rglob("*.session")] and Store(tmp_path).blocks.count() == (0, 0)
    old.close()


# -- answers that are not given ---------------------------------------------------------------------------


def opening_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions be opened slowly."""
    real = StoredSession.__init__

    def opened(stored: StoredSession, *given: Any, **own: Any) -> None:
        time.sleep(0.05)
        real(stored, *given, **own)

    monkeypatch.setattr(StoredSession, "__init__", opened)


def refused(engine: Engine, ids: list[int], how: str, monkeypatch: pytest.MonkeyPatch) -> Client:
    """An answer of a session that is not going to be given, so far that it may be refused with the next step."""
    sessions, key = engine.sessions, ("me", "talk")
    if how == "of another kind":
        return Client(engine, ids, name=key, method="tova", budget=99)
    if how == "too large":
        return Client(engine, ids, 10**8, name=key)
    if how == "fails":
        forward, recover = scheduling.forward, CachedText.recover

        def fail(model: Any, reads: list[Any]) -> list[Any]:
            cache = sessions.memory[key].cache if key in sessions.memory else None
            found, own = forward(model, reads), [read.cache is cache for read in reads]
            if any(own):
                monkeypatch.setattr(scheduling, "forward", forward)
            return [RuntimeError("no luck") if mine else one for mine, one in zip(own, found, strict=True)]

        def reset(past: CachedText, known: list[int]) -> None:  # the worst that may be
            monkeypatch.setattr(CachedText, "recover", recover)
            past.cache.reset()

        monkeypatch.setattr(scheduling, "forward", fail)
        monkeypatch.setattr(CachedText, "recover", reset)
        return Client(engine, ids, name=key)
    with monkeypatch.context() as patch:
        patch.setattr(engine.arbiter, "grants", lambda *given: False)
        client = Client(engine, ids, name=key)
        while engine._admission._refused is None:
            engine.step()
    engine._admission._refused = None
    client.job.cancel()
    return client


@pytest.mark.turns(2)
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("how", ["of another kind", "too large", "is cancelled", "fails"])
def test_an_answer_that_is_refused_costs_the_next_one_nothing(
    how: str, away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits already, the session is away or in memory, and a third one writes, so that steps do not wait
    for the store."""
    engine, parts, kind = serving(tmp_path), turns(2), METHODS[0]
    one = told(engine, parts[0], "talk", **kind)
    if away:
        engine.close()
        engine = serving(tmp_path)
    opening_slowly(monkeypatch)
    Client(engine, text(30, 9), 120)
    while not engine.running:
        engine.step()
    ids = [*parts[0], *one.ended.tokens, *parts[1]]
    bad, two = refused(engine, ids, how, monkeypatch), Client(engine, ids, NEW, name=("me", "talk"))
    run(engine)
    assert not bad.events[-1].written if how == "is cancelled" else isinstance(bad.events[-1], KvkeepError)
    assert two.ended.cached == len(ids) - len(parts[1]) - 1
    assert [[*one.ended.tokens], [*two.ended.tokens]] == alone(parts[:2], kind)
    assert engine.sessions.facts("me")["talk"]["note"] is None
    engine.close()
    (info,) = Store(tmp_path).sessions()
    assert (info.name, info.saves, info.in_use, info.problem) == ("me/talk", 2, False, None)
    kinds = {path.suffix or path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".block", "bytes", "kvkeep-store", "lock"}  # nothing unfinished


@pytest.mark.parametrize("gone", ["tokenizer", "folder", None])
def test_a_session_of_another_version_is_answered_without_it_and_stays(
    gone: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts, kind = turns(6), METHODS[2]
    expected, engine = alone(parts, kind), serving(tmp_path)
    told(engine, parts[0], "talk", **kind)
    engine.close()
    [path] = Store(tmp_path).path("me/talk").glob("*.json")
    data, _ = references.decode(path.read_bytes())
    path.write_bytes(
        references.encode({key: own for key, own in data.items() if key != gone} | ({} if gone else {"new": 1}))
    )
    before = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.suffix in (".json", ".block")}
    engine, ids = serving(tmp_path), list[int]()
    for number, part in enumerate(parts):
        ids += part
        one = told(engine, ids, "talk", **kind)
        assert [*one.ended.tokens] == expected[number] and (not number or one.ended.cached)
        ids += one.ended.tokens
        assert "another version of kvkeep" in engine.sessions.facts("me")["talk"]["note"]
    engine.close()
    assert {one: one.read_bytes() for one in tmp_path.rglob("*") if one.suffix in (".json", ".block")} == before
    assert [info.name for info in Store(tmp_path).sessions()] == ["me/talk"] and "damaged" not in caplog.text
