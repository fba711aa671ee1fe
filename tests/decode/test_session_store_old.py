"""Sessions saved turn by turn: what a turn costs, what a kill leaves, and a folder of them within limits."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, new_cache
from conftest import tokenizer
from families import tiny
from forked import started
from helpers import assert_near, prompt, step
from kvkeep.decode.session_file import SessionFile
from kvkeep.decode.session_store import SessionStore

from kvkeep import Conversation, KeepCache, Session, SessionError, UsageError, load_session, save_session
from kvkeep.decode import session_file
from kvkeep.errors import KvkeepError

TURNS = (0, 9, 14, 15, 31)

SOME = [
    *(("full", "llama"), ("static", "gpt2"), ("paged", "qwen3"), ("kv", "gemma3"), ("kv", "mistral")),
    *(("residual", "llama"), ("tokens", "qwen2"), ("h2o+kv", "phi3"), ("snapkv+verified, kv", "llama")),
    *(("h2o", "deepseek_v3"), ("streaming-llm", "llama"), ("kvzip", "llama"), ("revive", "llama")),
    *(("quest", "llama"), ("kvreviver", "qwen3"), ("kvslimmer", "llama"), ("cam", "llama")),
    *(("kv", "gemma4"), ("quantized", "gpt2")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "family"), SOME)
def test_saved_by_turns_it_is_as_if_it_had_never_been(name: str, family: str, tmp_path: Path) -> None:
    """Each turn goes on with the session that was saved after the one before; some are cropped before."""
    case, cache, model = CASES[name], new_cache(name, family), tiny(family)
    ids = prompt(1, case.length + 40, seed=3)
    cuts = [0, *(case.length + turn for turn in TURNS)]
    past = cache
    for number, (low, high) in enumerate(itertools.pairwise(cuts)):
        if number == 2 and case.equals and not any(cache.is_sliding):
            for one in (past, cache):
                one.crop(-3)
            low -= 3
        own = step(family, cache, ids[:, low:high])
        if past is not cache:
            assert_near(step(family, past, ids[:, low:high]), own)
        save_session(tmp_path / "s", Session(past, ids[:, :high].tolist(), {"turn": number}))
        past = load_session(tmp_path / "s", model).cache
    again = load_session(tmp_path / "s", model)
    assert again.ids == ids[:, : cuts[-1]].tolist() and again.notes == {"turn": len(cuts) - 2}
    with SessionFile(tmp_path / "s") as file:
        assert file.turns == len(TURNS)


def saved_turns(path: Path, method: str, turns: int, each: int = 30, **options: Any) -> tuple[KeepCache, list[int]]:
    """Save a cache after every turn; return it and the file's sizes."""
    cache, sizes = KeepCache(tiny("llama"), method, **options), []
    ids = prompt(1, turns * each)
    with SessionFile(path, writing=True) as file:
        for turn in range(turns):
            step("llama", cache, ids[:, turn * each : (turn + 1) * each])
            notes = {"messages": [{"role": "user", "content": "a word " * 9}] * (turn + 1)}
            save_session(file, Session(cache, ids[:, : (turn + 1) * each].tolist(), notes))
            sizes.append(path.stat().st_size)
    return cache, sizes


@pytest.mark.parametrize(
    ("method", "options"), [("full", {}), ("kv-direct", {"budget": 16, "checkpoint": "kv", "where": "host"})]
)
def test_a_turn_adds_what_it_adds(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    """Its entries, ids and the headers of their pages; of everything else no more at the tenth than at the second."""
    cache, sizes = saved_turns(tmp_path / "s", method, 12, **options)
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    model = cache.geometry
    entries = 30 * sum(4 * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in model.full_layers)
    resident = 16 * sum(4 * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in model.full_layers)
    headers = 3000  # of pages, and the turn's own table
    for more in grown[1:]:
        assert entries <= more <= entries + 30 * 12 + (resident if options else 0) + headers
    assert max(grown[1:]) - min(grown[1:]) < 600  # numbers that become longer
    assert sizes[-1] < 12 * (entries + (resident if options else 0) + headers) + 4000


def test_a_window_takes_its_new_entries_only(tmp_path: Path) -> None:
    """What is resident moved on by a turn, and is not written again."""
    options = {"budget": 200, "checkpoint": "kv", "where": "host"}
    cache, sizes = saved_turns(tmp_path / "s", "kv-direct", 30, each=15, **options)
    one = 15 * sum(4 * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in cache.geometry.full_layers)
    for before, after in itertools.pairwise(sizes[16:]):
        assert 2 * one <= after - before <= 2 * one + 6000  # here as resident, there as evicted
    again = load_session(tmp_path / "s", tiny("llama")).cache
    assert_near(step("llama", again, prompt(1, 3)), step("llama", cache, prompt(1, 3)), 0)


def test_what_is_dead_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lossy cache changes as a whole: its file stays about as large as what is alive in it."""
    monkeypatch.setattr(session_file, "SLACK_BYTES", 4000)
    cache, sizes = saved_turns(tmp_path / "s", "h2o", 30, each=5, budget=16, chunk=8)
    assert max(sizes) < 3 * min(sizes[10:]) + 4000 and any(
        after < before for before, after in itertools.pairwise(sizes)
    )
    again = load_session(tmp_path / "s", tiny("llama"))
    assert len(again.notes["messages"]) == 30
    assert_near(step("llama", again.cache, prompt(1, 3)), step("llama", cache, prompt(1, 3)))
    with SessionFile(tmp_path / "s") as file:
        assert file.turns == 30
    assert os.listdir(tmp_path) == ["s"]


def test_cut_anywhere_the_last_turn_goes_on(tmp_path: Path) -> None:
    """A real cache, cut at every border of a page, inside headers and inside pages."""
    path, cut, model, draw = tmp_path / "s", tmp_path / "cut", tiny("llama"), random.Random(0)
    _, ends = saved_turns(path, "h2o+checkpoint:kv", 4, each=11, budget=16, where="host")
    with SessionFile(path) as file:
        borders = [place for place in file._journal.pages if place > ends[0]]
    whole = path.read_bytes()
    places = [
        *ends,
        *draw.sample([*borders, *(place + 7 for place in borders), *(place + 40 for place in borders)], 60),
    ]
    for size in places:
        cut.write_bytes(whole[:size])
        known = sum(end <= size for end in ends)
        session = load_session(cut, model)
        assert session.cache.get_seq_length() == 11 * known == len(session.ids[0])
        assert len(session.notes["messages"]) == known
    for _ in range(80):  # and no bit is lost unnoticed, but where nothing lives any more
        place, bit = draw.randrange(len(whole)), draw.randrange(8)
        cut.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            session = load_session(cut, model)
        except SessionError as error:
            assert "damaged" in str(error) or "version" in str(error) or "not a session" in str(error)
        else:
            original = load_session(path, model)
            assert_near(*(step("llama", one.cache, prompt(1, 2)) for one in (session, original)), 0)
            assert session.ids == original.ids and session.notes == original.notes


def turns_without_end(path: Path) -> None:
    """A program: a turn after the other, each told when it is saved."""
    cache, ids = KeepCache(tiny("llama"), "kv-direct", 16, checkpoint="kv", where="disk"), prompt(1, 500)
    with SessionFile(path, writing=True) as file:
        for turn in range(100):
            step("llama", cache, ids[:, turn * 5 : turn * 5 + 5])
            save_session(file, Session(cache, ids[:, : turn * 5 + 5].tolist(), {"turn": turn}))
            print(turn, flush=True)


@pytest.mark.parametrize("turns", [3, 17])
def test_a_killed_process_loses_the_turn_in_hand_and_nothing_else(tmp_path: Path, turns: int) -> None:
    path = tmp_path / "s"
    with started(partial(turns_without_end, path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(turns)]
        process.kill()
    assert process.returncode == -signal.SIGKILL and os.listdir(tmp_path) == ["s"]
    session = load_session(path, tiny("llama"))
    length = session.cache.get_seq_length()
    assert said[-1] <= session.notes["turn"] <= said[-1] + 40 and length == 5 * session.notes["turn"] + 5
    unbroken = KeepCache(tiny("llama"), "full")
    ids = prompt(1, 500)
    step("llama", unbroken, ids[:, :length])
    assert_near(
        step("llama", session.cache, ids[:, length : length + 3]), step("llama", unbroken, ids[:, length : length + 3])
    )
    save_session(path, Session(session.cache, ids[:, : length + 3].tolist()))  # nobody holds it any more


def test_another_tokenizer_rotation_or_budget_is_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    talk = Conversation(model, tokenizer(), KeepCache(model, "h2o", 16))
    talk.answer("the of and", max_new_tokens=3)
    talk.save(tmp_path / "s")
    other = tokenizer()
    other.add_tokens(["another"])
    with pytest.raises(SessionError, match="another tokenizer"):
        Conversation.resume(model, other, tmp_path / "s")
    before = dict(model.config.rope_parameters)
    try:
        model.config.rope_parameters = before | {"rope_theta": 12345.0}
        with pytest.raises(SessionError, match="another model"):
            Conversation.resume(model, tokenizer(), tmp_path / "s")
    finally:
        model.config.rope_parameters = before
    with SessionFile(tmp_path / "s", writing=True) as file:
        parts = {name: file.tensor(name) for name in file.stored}
        file.save(parts, file.about | {"chunk": file.about["chunk"] + 1})
    with pytest.raises(SessionError, match="Start a new session"):
        Conversation.resume(model, tokenizer(), tmp_path / "s")


# -- a folder of them ------------------------------------------------------------------------------------


def filled(folder: Path, *names: str, **limits: Any) -> SessionStore:
    """Return a store of sessions, the first of which was used longest ago."""
    store, cache = SessionStore(folder, **limits), KeepCache(tiny("llama"), "full")
    step("llama", cache, prompt(1, 20))
    for number, name in enumerate(names):
        with store.open(name) as file:
            save_session(file, Session(cache, prompt(1, 20).tolist(), {"name": name}))
        os.utime(store.path(name), (1e9 + number, 1e9 + number))
    return store


def test_sessions_have_names_and_owners(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", "ann", "key-1/ann", "key-2/ann")
    assert [info.name for info in store.sessions()] == ["key-2/ann", "key-1/ann", "ann"]
    assert [info.name for info in store.sessions("key-1")] == ["key-1/ann"]
    info = store.info("key-1/ann")
    assert (info.tokens, info.turns, info.method, info.held, info.problem) == (20, 1, "full", False, None)
    assert load_session(store.path("key-1/ann"), tiny("llama")).notes == {"name": "key-1/ann"}
    store.remove("key-1/ann")
    assert not (tmp_path / "store" / "key-1").exists()
    with pytest.raises(SessionError, match="no session 'key-1/ann'"):
        store.info("key-1/ann")
    (tmp_path / "store" / "broken.session").write_text("something else")
    assert "not a session" in str(store.info("broken").problem)
    store.remove("broken")
    assert [info.name for info in store.sessions()] == ["key-2/ann", "ann"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        ".",
        "../x",
        "a/../b",
        "/etc/x",
        "a/b/c",
        "a\\b",
        ".hidden",
        "a/.b",
        "a\n",
        "a.",
        "ä",
        "x" * 200,
        "a.session",
        "-x",
    ],
)
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    store = SessionStore(tmp_path / "store")
    for refused in (store.open, store.read, store.info, store.remove, store.path):
        with pytest.raises(UsageError, match="cannot be the name"):
            refused(name)
    assert not (tmp_path / "store").exists()


def test_the_least_recently_used_go_first_and_none_in_use(tmp_path: Path) -> None:
    names = ["one", "two", "three", "key/four", "five"]
    store = filled(tmp_path, *names)
    each = store.info("five").bytes
    assert store.evict() == []
    store.quota = 3 * each + 200
    with store.open("one") as file:  # which makes it the one used last
        assert store.evict() == ["two", "three"] and store.info("one").held
        with pytest.raises(SessionError, match="in use"):
            store.remove("one")
        os.utime(store.path("one"), (1, 1))
        store.quota = 0
        assert store.evict() == ["key/four", "five"]
        cache = KeepCache(tiny("llama"), "full")
        save_session(file, Session(cache, [], {"name": "still there"}))
    store.quota, store.age = None, 1000
    assert store.evict() == []
    os.utime(store.path("one"), (1, 1))
    assert store.evict() == ["one"] and os.listdir(tmp_path) == []


def test_one_that_cannot_be_removed_keeps_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, unlink = filled(tmp_path, "one", "two", quota=0), Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self.name == "one.session":
            raise PermissionError(13, "Permission denied")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert store.evict() == ["two"] and [info.name for info in store.sessions()] == ["one"]
    with pytest.raises(SessionError, match="'one' cannot be removed: permission denied"):
        store.remove("one")


def test_out_and_in_again_it_is_the_same(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", "ann")
    store.export("ann", tmp_path / "file")
    with pytest.raises(SessionError, match="already"):
        store.export("ann", tmp_path / "file")
    store.add(tmp_path / "file", "key/ben")
    with pytest.raises(SessionError, match="already"):
        store.add(tmp_path / "file", "ann")
    own, other = (load_session(store.path(name), tiny("llama")) for name in ("ann", "key/ben"))
    assert own.ids == other.ids and own.notes == other.notes
    assert torch.equal(step("llama", own.cache, prompt(1, 2)), step("llama", other.cache, prompt(1, 2)))
    ann, ben = store.info("ann"), store.info("key/ben")
    assert (ann.turns, ann.created) == (ben.turns, ben.created)
    whole = bytearray((tmp_path / "file").read_bytes())
    with SessionFile(tmp_path / "file") as file:
        place = max(file._journal.pages)
    whole[place + 40] ^= 1
    (tmp_path / "file").write_bytes(whole)
    with pytest.raises(KvkeepError, match="damaged"):
        store.add(tmp_path / "file", "eve")
    assert not store.path("eve").exists()
