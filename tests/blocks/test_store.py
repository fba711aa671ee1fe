"""A folder of sessions: names, owners, limits, and what removing one leaves to the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from families import tiny
from helpers import prompt, step

from kvkeep import KeepCache, Session, SessionError, UsageError
from kvkeep.blocks import references
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import ABANDONED_S, Store
from kvkeep.blocks.text import session_key


def saved(store: Store, *names: str, length: int = 20) -> Store:
    """Save sessions of a short text, the first of which was used longest ago."""
    cache = KeepCache(tiny("llama"), "full")
    step("llama", cache, prompt(1, length))
    for number, name in enumerate(names):
        with StoredSession(store, name, writing=True) as stored:
            stored.save(Session(cache, prompt(1, length).tolist(), {"name": name}))
        for path in store.path(name).iterdir():
            os.utime(path, (1e9 + number, 1e9 + number))
    return store


def test_sessions_have_names_and_owners(tmp_path: Path) -> None:
    store = saved(Store(tmp_path / "store"), "ann", "key-1/ann", "key-2/ann")
    assert [info.name for info in store.sessions()] == ["key-2/ann", "key-1/ann", "ann"]
    assert [info.name for info in store.sessions("key-1")] == ["key-1/ann"]
    info = store.info("key-1/ann")
    assert (info.tokens, info.saves, info.method, info.in_use, info.problem) == (20, 1, "full", False, None)
    with StoredSession(store, "key-1/ann") as stored:
        assert stored.load(tiny("llama")).notes == {"name": "key-1/ann"}
    store.remove("key-1/ann")
    assert not (tmp_path / "store" / "sessions" / "key-1").exists()
    assert {name.space for name in store.blocks.names()} == {"_", "key-2"}
    with pytest.raises(SessionError, match="no session 'key-1/ann'"):
        store.info("key-1/ann")
    for path in store.path("ann").glob("*.json"):
        path.write_text("something else")
    assert "damaged" in str(store.info("ann").problem)
    store.remove("ann")
    assert [info.name for info in store.sessions()] == ["key-2/ann"]


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", ".", "../x", "a/../b", "/etc/x", "a/b/c", "a\\b", ".hidden", "a/.b", "a\n", "a.", "ä", "x" * 200),
        *("a.session", "-x", "_/x"),
    ],
)
def test_a_name_is_no_path_and_no_owner_has_the_local_namespace(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "store")
    for refused in (store.open, store.read, store.info, store.remove, store.path):
        with pytest.raises(UsageError, match="cannot be the name"):
            refused(name)
    assert not (tmp_path / "store").exists()


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("what another program wrote")
    for folder in (tmp_path, tmp_path / "other", tmp_path / "other" / "below"):
        with pytest.raises(UsageError):
            Store(folder).open("a")
    assert os.listdir(tmp_path) == ["other"]
    saved(Store(tmp_path / "store"), "a")
    for marker in (b"\xed\xff", b"2\n"):
        (tmp_path / "store" / "kvkeep-store").write_bytes(marker)
        with pytest.raises(UsageError):
            Store(tmp_path / "store").read("a")
    with pytest.raises(UsageError, match="version"):
        Store(tmp_path / "store").read("a")


def test_sessions_over_the_age_go_and_none_in_use(tmp_path: Path) -> None:
    store = saved(Store(tmp_path, age=1000), "one", "two", "key/three")
    with store.open("one"):  # which is a use
        assert store.evict() == 2 and store.info("one").in_use
        with pytest.raises(SessionError, match="in use"):
            store.remove("one")
        for path in store.path("one").iterdir():
            os.utime(path, (1, 1))
        assert store.evict() == 0
    assert store.evict() == 1 and not store.sessions()
    assert not store.blocks.names()


def test_blocks_of_sessions_that_none_names_go(tmp_path: Path) -> None:
    """What a killed save or removal left; not before another program may have named them."""
    store = saved(Store(tmp_path), "me/talk")
    kept = store.blocks.names()
    left = [BlockName(space, session_key()) for space in ("me", "_")]
    for name in left:
        store.blocks.write(name, {})
    store.evict()
    assert {*store.blocks.names()} == {*kept, *left}
    for name in (*left, *kept):
        store.blocks.use([name], 10**9)
    assert {*left} < {*store.blocks.names(unused_s=ABANDONED_S)}
    store.evict()
    assert store.blocks.names() == kept


@pytest.mark.parametrize("place", ["listdir", "read"])
def test_blocks_stay_while_another_session_cannot_be_read(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(Store(tmp_path), "me/a", "me/b")
    shared = BlockName("me", "0" * 32)
    store.blocks.write(shared, {})

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        if place == "listdir":
            patch.setattr(references.os, "listdir", refuse)
        else:
            patch.setattr(references, "read_file", refuse)
        store.release("me/a", {shared.key})
    assert store.blocks.has(shared)
    store.release("me/a", {shared.key})
    assert not store.blocks.has(shared)
