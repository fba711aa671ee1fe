"""Foreign files in a store are not used, followed, changed, removed or waited for."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from storing import TURNS, check_whole, kept, session, store_text
from typer.testing import CliRunner

from kvkeep import SessionError
from kvkeep.blocks import archive
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import MARKER, Store
from kvkeep.blocks.verify import verify
from kvkeep.cli.cache import app
from kvkeep.errors import KvkeepError, SessionDamaged, SessionUnwritable

pytestmark = pytest.mark.usefixtures("kernels")
NAME = "me/talk"
PRECIOUS = b"precious" * 100


@contextmanager
def at_once(seconds: int = 60) -> Iterator[None]:
    """Fail instead of waiting for ever, as opening a pipe would."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def lay_socket(path: Path, target: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def lay_folder(path: Path, target: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_bytes(PRECIOUS)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "file": lambda path, target: path.write_bytes(PRECIOUS),
    "folder": lay_folder,
    "link": lambda path, target: path.symlink_to(target),
    "link to a folder": lambda path, target: path.symlink_to(target.parent),
    "link to nothing": lambda path, target: path.symlink_to(target.with_name("nothing")),
    "hard link": lambda path, target: path.hardlink_to(target),
    "pipe": lambda path, target: os.mkfifo(path),
    "socket": lay_socket,
    "endless device": lambda path, target: path.symlink_to("/dev/zero"),
}
KEY = "ab" + 30 * "0"
PLACES = (
    *("notes.txt", ".hidden", ".x.saving-y", "blocks/notes.block", "blocks/x.block", "blocks/me/notes.block"),
    *(f"blocks/{KEY}.block", f"blocks/me/{KEY}.block", f"blocks/me/cd/{KEY}.block", "blocks/me/ab", "blocks/you"),
    *("sessions/notes", "sessions/x.session", "sessions/me/notes.txt", "sessions/me/x.session", "sessions/_"),
    *(f"sessions/{NAME}.session/{name}" for name in ("7.txt", "007.json", "٣.json", "0.json", "-1.json", "+4.json")),
    *(f"sessions/{NAME}.session/{name}" for name in (f"{2**63}.json", "9" * 20 + ".json", "notes", "1e3.json")),
)


def facts(path: Path) -> object:
    own = path.lstat()
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    return own.st_mode, own.st_ino, own.st_size * (not path.is_dir()), own.st_mtime_ns, content


def use(store: Store, folder: Path) -> None:
    """Do with a store whatever is done with one."""
    assert check_whole(store, NAME, "h2o") in TURNS
    store_text(store, NAME, "h2o")
    archive.export(store, NAME, folder / "talk.tar")
    archive.add(folder / "talk.tar", store, "me/imported")
    store.age = 10.0**6
    store.evict()
    store.remove_unused()
    assert not verify(store).damaged
    assert {info.name for info in store.sessions() if info.problem is None} == {NAME, "me/imported"}
    store.remove("me/imported")
    assert check_whole(Store(store.folder, quota=None), NAME, "h2o") == TURNS[1]


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_others_have_put_into_a_store_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    store, target = Store(tmp_path / "store"), tmp_path / "elsewhere" / "target"
    store_text(store, NAME, "h2o", TURNS[0])
    target.parent.mkdir()
    target.write_bytes(PRECIOUS)
    laid = list[Path]()
    for place in PLACES:
        path = store.folder / place
        path.parent.mkdir(exist_ok=True)
        if path.name == "x.session" and kind == "folder":
            continue  # it is a session that was never saved
        KINDS[kind](path, target)
        laid.append(path)
    before = [facts(path) for path in (target, *laid)]
    with at_once():
        use(Store(store.folder), tmp_path)
        assert [facts(path) for path in (target, *laid)] == before
        listed = CliRunner().invoke(app, ["list", "--sessions", str(store.folder)])
        assert listed.exit_code == 0, listed.output
        with pytest.raises(SessionError, match="other files"):
            store.remove(NAME)
    assert [facts(path) for path in (target, *laid)] == before
    assert not store.files(NAME).generations()


OURS = (
    *("blocks/bytes", MARKER, f"sessions/{NAME}.session/lock", f"sessions/{NAME}.session/2.json", "STATE"),
    *(f"sessions/{NAME}.session", "sessions/me", "sessions", "blocks", "blocks/me", "BLOCK"),
)


@pytest.mark.turns(5)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("file", "hard link")])
@pytest.mark.parametrize("place", OURS)
def test_another_thing_in_the_place_of_a_file_is_a_sentence_and_stays(place: str, kind: str, tmp_path: Path) -> None:
    store, target = Store(tmp_path / "store"), tmp_path / "elsewhere" / "target"
    store_text(store, NAME, "kv-direct", TURNS[0])
    with StoredSession(store, NAME) as stored:
        assert stored.about is not None
        named = {"STATE": stored.about["state"], "BLOCK": stored.about["blocks"][0]}
    path = store.blocks.path(stored.block(named[place])) if place in named else store.folder / place
    target.parent.mkdir()
    target.write_bytes(PRECIOUS)
    if os.path.lexists(path):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    KINDS[kind](path, target)
    before = [facts(one) for one in (target, path)]
    seen = os.listdir(target.parent)
    with at_once():
        for work in (
            lambda: store_text(Store(store.folder), NAME, "kv-direct"),
            lambda: store_text(store, NAME, "full"),
            lambda: check_whole(Store(store.folder), NAME, "full"),
            lambda: Store(store.folder, quota=1, age=0.0).evict(),
            lambda: verify(Store(store.folder)),
            lambda: Store(store.folder).remove(NAME),
        ):
            try:
                work()
            except (KvkeepError, AssertionError) as error:  # what is there has been evicted
                assert len(str(error).splitlines()) == 1 or isinstance(error, AssertionError)
    assert target.read_bytes() == PRECIOUS and os.listdir(target.parent) == seen
    if kind != "folder":
        assert [facts(one) for one in (target, path)] == before


def test_a_huge_generation_is_damage_and_is_not_read(tmp_path: Path) -> None:
    store_text(Store(tmp_path), NAME, "full")
    with open(Store(tmp_path).path(NAME) / "12.json", "wb") as file:
        file.truncate(10 * 2**30)
    with at_once(10):
        for writing in (False, True):
            with pytest.raises(SessionDamaged, match="file too large"):
                StoredSession(Store(tmp_path), NAME, writing=writing)
        assert verify(Store(tmp_path)).damaged
        assert Store(tmp_path).set_aside(NAME) == f"{NAME}.damaged-1"


def test_something_else_in_the_place_of_the_next_save_is_a_sentence(tmp_path: Path) -> None:
    with StoredSession(Store(tmp_path), NAME, writing=True) as stored:
        stored.save(session(kept("full", TURNS[0]), length=TURNS[0]))
        (other := stored.files.path / "2.json").mkdir()
        with pytest.raises(SessionUnwritable, match="not a regular file"):
            stored.save(session(kept("full"), length=TURNS[1]))
        other.rmdir()
        stored.save(session(kept("full"), length=TURNS[1]))
    assert check_whole(Store(tmp_path), NAME, "full") == TURNS[1] and stored.files.generations() == [2]
