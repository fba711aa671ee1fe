"""The last saved turn is whole, whichever operation of the next save or load fails or is interrupted by a kill."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import exit_codes
from storing import (
    FAULTS,
    IDS,
    REFUSED,
    SAVED,
    TURNS,
    UNREACHED,
    check_whole,
    files,
    following,
    full_disk,
    io_error,
    kept,
    kill,
    model,
    next_logits,
    session,
    store_text,
    with_fault,
)

from kvkeep import SessionError, load_session
from kvkeep.blocks import store as store_module
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.errors import StoreError

pytestmark = pytest.mark.usefixtures("kernels")
AT_ONCE, SLOW = 8, pytest.mark.slow


def faults(
    tmp_path: Path, turn: int, name: str, fault: Callable[[], None], every: int
) -> Iterator[tuple[Store, int | None]]:
    """Save a turn in processes of which each has the fault at another operation, in a store of its own; yield the
    stores, and how the processes ended. every: every which operation."""
    base = Store(tmp_path / "base")
    if turn:
        store_text(base, "me/talk", name, TURNS[0])
    else:
        base.create()
    cache, at = kept(name, TURNS[turn]), 1

    def save(folder: Path) -> None:
        with StoredSession(Store(folder), "me/talk", writing=True) as stored:
            stored.save(session(cache, length=TURNS[turn]))

    while True:
        folders = [Path(shutil.copytree(base.folder, tmp_path / str(one))) for one in range(AT_ONCE)]
        runs = [
            partial(with_fault, partial(save, folder), at + every * number, fault)
            for number, folder in enumerate(folders)
        ]
        for folder, code in zip(folders, exit_codes(*runs), strict=True):
            if code == UNREACHED:
                assert at > 20  # there were operations
                return
            yield Store(folder), code
        for folder in folders:
            shutil.rmtree(folder)
        at += AT_ONCE * every


def check_recovered(store: Store, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program saves the turn; evict removes what the first one left behind."""
    store_text(store, "me/talk", name)
    assert check_whole(store, "me/talk", name) == TURNS[1]
    monkeypatch.setattr(store_module, "ABANDONED_S", -1.0)
    store.evict()
    with StoredSession(store, "me/talk") as stored:
        about = stored.about
        assert about is not None
        own = {store.blocks.path(stored.block(key)) for key in (about["state"], *about["blocks"])}
    rest = {path for path in files(store.folder) if path.suffix == ".block"} - own
    assert not {path.name for path in rest if path.name.startswith("x")}
    assert not [path for path in files(store.folder) if "saving" in path.name]
    folder = store.path("me/talk")
    assert len(files(folder)) == 2, files(folder)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("when", "name", "every"),
    [
        ("next", "kv-direct", 5),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("next", "h2o", 1), ("first", "full", 1))),
    ],
)
def test_killed_at_any_operation_of_a_save(
    when: str, name: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = 0 if when == "first" else 1
    before, after = (0, *TURNS)[turn], TURNS[turn]
    saves = set()
    for store, code in faults(tmp_path, turn, name, kill, every):
        assert code == -signal.SIGKILL
        if before or any(path.suffix == ".json" for path in files(store.folder)):
            saves.add(check_whole(store, "me/talk", name))
        else:
            saves.add(0)
        check_recovered(store, name, monkeypatch)
    assert saves == {before, after}


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("when", "fault", "every"),
    [
        ("next", full_disk, 5),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                *(("next", io_error, 1), ("first", io_error, 1)),
                *(("next", fault, 1) for fault in FAULTS.values()),
            )
        ),
    ],
)
def test_failing_at_any_operation_of_a_save(
    when: str, fault: Callable[[], None], every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is refused leaves the turn before, and one that returns has saved its own."""
    turn = 0 if when == "first" else 1
    before, after = (0, *TURNS)[turn], TURNS[turn]
    codes = set()
    for store, code in faults(tmp_path, turn, "kv-direct", fault, every):
        assert code in (SAVED, REFUSED), "see the error above"
        codes.add(code)
        if code == SAVED:
            assert check_whole(store, "me/talk", "kv-direct") == after
        elif before:
            assert check_whole(store, "me/talk", "kv-direct") == before
        else:
            assert not [path for path in files(store.folder) if path.suffix == ".json"]
        check_recovered(store, "kv-direct", monkeypatch)
    assert codes == {SAVED, REFUSED}


@pytest.mark.parametrize("dies", [True, False])
def test_a_disk_that_is_full_in_the_middle_of_a_file(
    dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Store(tmp_path / "base")
    store_text(base, "me/talk", "kv-direct", TURNS[0])
    cache = kept("kv-direct")

    def save(folder: Path, most: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if dies else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        try:
            with StoredSession(Store(folder), "me/talk", writing=True) as stored:
                stored.save(session(cache, length=TURNS[1]))
        except SessionError:
            os._exit(REFUSED)
        os._exit(SAVED)

    sizes = sorted({path.stat().st_size for path in files(base.folder)})
    limits = [0, 4, 9, 100, 2000, *(size - 1 for size in sizes if size > 2000), 10**7]
    folders = [Path(shutil.copytree(base.folder, tmp_path / str(most))) for most in limits]
    codes = exit_codes(*(partial(save, *given) for given in zip(folders, limits, strict=True)))
    assert {*codes} == {SAVED, -signal.SIGXFSZ if dies else REFUSED}
    for folder, code in zip(folders, codes, strict=True):
        assert check_whole(Store(folder), "me/talk", "kv-direct") == TURNS[code == SAVED]
        check_recovered(Store(folder), "kv-direct", monkeypatch)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("full", io_error), ("kv-direct", io_error)),
        *(pytest.param("kv-direct", fault, marks=pytest.mark.slow, id=code) for code, fault in FAULTS.items()),
    ],
)
def test_an_error_at_any_operation_of_a_load(name: str, fault: Callable[[], None], tmp_path: Path) -> None:
    """The right bits, or a sentence."""
    store_text(Store(tmp_path), "me/talk", name)
    model(), following(name)

    def go_on() -> None:
        with StoredSession(Store(tmp_path), "me/talk") as stored:
            loaded = load_session(stored, model())
        assert loaded.ids == IDS[:, : TURNS[1]].tolist()
        assert torch.equal(next_logits(loaded.cache), following(name))

    codes, at = list[Any](), 1
    while UNREACHED not in codes:
        runs = [partial(with_fault, go_on, at + number, fault) for number in range(AT_ONCE)]
        codes += exit_codes(*runs)
        at += AT_ONCE
    assert {*codes} == {SAVED, REFUSED, UNREACHED} and codes.index(UNREACHED) > 5
    assert check_whole(Store(tmp_path), "me/talk", name) == TURNS[1]


def test_two_writers_of_one_session_lose_no_turn(tmp_path: Path) -> None:
    """Each program goes on with what it finds, until its turn is saved."""
    cache = kept("full", 3)

    def talk(who: str) -> None:
        for number in range(12):
            while True:
                try:
                    with StoredSession(Store(tmp_path), "talk", writing=True) as stored:
                        said = stored.about["notes"]["said"] if stored.about else []
                        stored.save(session(cache, said=[*said, f"{who}{number}"]))
                except SessionError as error:
                    assert type(error).__name__ == "SessionBusy", error
                else:
                    break

    assert exit_codes(partial(talk, "a"), partial(talk, "b")) == [0, 0]
    with StoredSession(Store(tmp_path), "talk") as stored:
        assert stored.about is not None and stored.saves == 24
        said = stored.about["notes"]["said"]
    for who in "ab":
        assert [one for one in said if one.startswith(who)] == [f"{who}{number}" for number in range(12)]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_text(Store(tmp_path), "me/talk", "kv-direct")
    opened = os.open

    def read_only(path: Any, flags: int, *given: Any, **own: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system")
        return opened(path, flags, *given, **own)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    for name in ("utime", "mkdir", "unlink", "link", "rename", "replace"):
        monkeypatch.setattr(os, name, refuse)
    assert check_whole(Store(tmp_path), "me/talk", "kv-direct") == TURNS[1]
    with pytest.raises(StoreError, match="read-only file system"):
        Store(tmp_path, quota=1, age=-1).evict()
    with pytest.raises(SessionError, match="read-only file system"):
        store_text(Store(tmp_path), "me/talk", "kv-direct")
