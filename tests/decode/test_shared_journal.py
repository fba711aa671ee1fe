"""A journal in a shared folder: whatever one writer does while another one pauses that has lost its lock, nothing that
was committed is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kvkeep.decode.journal import Journal, Writer, digest_of
from kvkeep.decode.session_store import SessionStore
from kvkeep.decode.shared_journal import TAKEN, SharedWriter

from kvkeep.decode import journal, shared_journal
from kvkeep.errors import SessionBusy, SessionError, UsageError


@pytest.fixture(autouse=True)
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "fcntl", None)
    monkeypatch.setattr(shared_journal, "_EACH_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Told:
    """Turns that a writer was told of as saved, and those of which it was told that they are not."""

    def __init__(self) -> None:
        self.saved: list[bytes] = []
        self.refused: list[bytes] = []

    def commit(self, writer: Writer, turn: bytes) -> None:
        try:
            data = turn * 50
            writer.add([data], digest_of([data]))
            writer.commit(turn)
        except BaseException:
            writer.undo()
            self.refused.append(turn)
            raise
        self.saved.append(turn)


class Paused:
    """Calls ``meanwhile`` once, before the step ``at`` of all that touches files. before: the name of that step."""

    def __init__(self, at: int, meanwhile: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.meanwhile, self.steps, self.before = at, meanwhile, 0, ""
        steps: list[tuple[Any, str]] = [(os, "rename"), (os, "link"), (os, "fsync"), (os, "mkdir"), (os, "listdir")]
        for place, name in [*steps, (Path, "unlink"), (Path, "exists")]:
            monkeypatch.setattr(place, name, self.noticed(getattr(place, name)))
        for place, name in [(Writer, "_write"), (Writer, "_check_lease"), (Journal, "_scan"), (Journal, "_read")]:
            monkeypatch.setattr(place, name, self.noticed(getattr(place, name)))
        monkeypatch.setattr(shared_journal, "is_at", self.noticed(shared_journal.is_at))
        monkeypatch.setattr(journal, "is_at", self.noticed(journal.is_at))

    def noticed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **own: Any) -> Any:
            self.steps += 1
            if self.steps == self.at:
                self.before = function.__name__
                self.meanwhile()
            return function(*given, **own)

        return call


def rewritten(writer: SharedWriter, turns: list[bytes]) -> None:
    def fill(fresh: SharedWriter) -> None:
        for turn in turns:
            fresh.commit(turn)

    writer.rewrite(fill)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("other", "ends"), [("goes on", True), ("is killed", False), ("removes", True)])
def test_a_pause_of_any_length_anywhere_loses_nothing(
    other: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writer opens, commits twice, rewrites, commits and closes. At each of its steps another one does all of its
    own, and is killed or ends."""
    at, done = 0, False
    while not done:
        at += 1
        path = tmp_path / f"{at}" / "talk.session"
        path.parent.mkdir()
        first = SharedWriter(path)
        early = Told()
        early.commit(first, b"0")
        if ends:
            first.close()
        own, its, held = Told(), Told(), list[Any]()

        def meanwhile(path: Path = path, its: Told = its, held: list[Any] = held) -> None:
            try:
                writer = SharedWriter(path)
                held.append(writer)  # it is not closed by being forgotten
                if other == "removes":
                    writer.remove()
                    its.saved.append(b"gone")
                    return
                its.commit(writer, b"x")
                rewritten(writer, [*writer.turns])
                its.commit(writer, b"y")
                if ends:
                    writer.close()
            except SessionBusy:
                pass

        with monkeypatch.context() as patch:
            pause = Paused(at, meanwhile, patch)
            try:
                writer = SharedWriter(path)
                held.append(writer)
                own.commit(writer, b"a")
                own.commit(writer, b"b")
                rewritten(writer, [*writer.turns])
                own.commit(writer, b"c")
                writer.close()
            except (SessionBusy, OSError):
                pass
            done = pause.steps < at
        if b"gone" in its.saved:
            assert not files(path.parent) or not own.refused or Journal(path).turns, at
        last = SharedWriter(path)  # neither damaged nor in use
        turns = [*last.turns]
        if b"gone" not in its.saved:
            assert turns[0] == b"0", (at, turns)
            for told in (own, its):
                kept = [turn for turn in turns if turn in told.saved]
                assert kept == told.saved, (at, turns, own.saved, its.saved)
            assert len({*turns}) == len(turns)
            assert {*turns} <= {b"0", *own.saved, *own.refused, *its.saved, *its.refused}
        for page in last.pages:
            last.page(page)
        last.close()
        assert files(path.parent) in ([path], []), at
    assert at > 40


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_that_fails_anywhere_loses_nothing_and_leaves_nothing(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer opens, commits, rewrites, commits and closes, after one that has ended or was killed. Each of its steps
    fails once, as on a full disk."""

    def full() -> None:
        raise OSError(28, "No space left on device")

    at, done = 0, False
    while not done:
        at += 1
        path = tmp_path / f"{at}" / "talk.session"
        path.parent.mkdir()
        first, told = SharedWriter(path), Told()
        told.commit(first, b"0")
        if ends:
            first.close()
        held = list[SharedWriter]()
        with monkeypatch.context() as patch:
            failed = Paused(at, full, patch)
            with suppress(SessionError, OSError):
                held.append(SharedWriter(path))
                told.commit(held[0], b"a")
                rewritten(held[0], [*held[0].turns])
                told.commit(held[0], b"b")
                held[0].close()
            done = failed.steps < at
        for writer in held:
            writer.close()
        if failed.before != "unlink":  # else the next one removes it
            assert all(name.suffix == ".session" or name.parent.name == TAKEN for name in files(path.parent)), at
        last = SharedWriter(path)
        assert [turn for turn in last.turns if turn in told.saved] == told.saved, (at, last.turns)
        assert {*last.turns} <= {*told.saved, *told.refused} and len({*last.turns}) == len(last.turns)
        for page in last.pages:
            last.page(page)
        last.close()
        assert files(path.parent) == [path], (at, files(path.parent))
    assert at > 40


def test_a_session_whose_writer_was_killed_while_it_took_it_is_in_the_store(tmp_path: Path) -> None:
    """It is listed, read, counted, evicted and removed, and another session of a similar name is not taken for it."""
    store, now = SessionStore(tmp_path, shared=True, quota=10**6), time.time()
    for name in ("me/talk", "me/talk.session.a"):
        with store.open(name) as file:
            file.save({"session.ids": torch.ones(1, 4, dtype=torch.long)}, {"family": "", "method": "", "budget": ""})
    whole, taken = sum(one.bytes for one in store.sessions()), tmp_path / "me" / shared_journal.TAKEN

    def leave() -> None:
        taken.mkdir(exist_ok=True)
        left = taken / "talk.session.0123456789abcdef"
        store.path("me/talk").rename(left)
        os.utime(left, (now - 100, now - 100))

    leave()
    (taken / "talk.session.a.session.0123").write_bytes(b"")  # which the one in its place is later than
    found = store.sessions()
    assert [(one.name, one.turns, one.problem) for one in found] == [
        ("me/talk.session.a", 1, None),
        ("me/talk", 1, None),
    ]
    assert store.sessions("me") == found and store.info("me/talk").used == pytest.approx(now - 100)
    for quota, over in ((whole, []), (whole - 1, ["me/talk"]), (0, ["me/talk", "me/talk.session.a"])):
        assert SessionStore(tmp_path, shared=True, quota=quota).over_quota() == over
    assert sum(one.bytes for one in found) == whole and store.read("me/talk").turns == 1
    with store.open("me/talk") as file:
        assert file.turns == 1
    leave()
    assert SessionStore(tmp_path, shared=True, age=50).evict() == ["me/talk"] and not store.evict()
    with store.open("me/talk") as file:
        assert not file.turns
        file.save({"session.ids": torch.ones(1, 4, dtype=torch.long)}, {})
    leave()
    store.remove("me/talk")
    store.remove("me/talk.session.a")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(SessionError, match="There is no session"):
        store.remove("me/talk")


@pytest.mark.parametrize(("place", "name"), [(os, "link"), (shared_journal.fcntl, "flock")])
def test_a_folder_without_links_or_locks_cannot_be_shared(
    place: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    SharedWriter.check_folder(tmp_path)
    monkeypatch.setattr(place, name, refuse)
    with pytest.raises(UsageError, match="locked and linked: operation not supported"):
        SharedWriter.check_folder(tmp_path)
    assert not files(tmp_path)
