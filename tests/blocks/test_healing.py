"""A store that is removed or replaced while a program uses it is written again as a whole, with one warning."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from forked import exit_codes
from storing import TURNS, check_whole, files, kept, session, store_text

from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import MARKER, Store
from kvkeep.errors import SessionBusy, SessionUnwritable

pytestmark = pytest.mark.usefixtures("kernels")
NAME = "me/talk"


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.mkdir()


def restored(folder: Path) -> None:
    """The backup of an earlier time is put in the place of the folder."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("backup"), folder)


def restored_in_place(folder: Path) -> None:
    """The same, as rsync --inplace --delete does it: files that there are keep their numbers."""
    backup = folder.with_name("backup")
    earlier = {path.relative_to(backup) for path in files(backup)}
    for path in files(folder):
        if path.relative_to(folder) not in earlier:
            path.unlink()
    for path in earlier:
        with open(folder / path, "wb") as file:
            file.write((backup / path).read_bytes())


DISASTERS: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "emptied, or unmounted": emptied,
    "moved, an empty one in its place": moved,
    "its parent removed": lambda folder: shutil.rmtree(folder.parent),
    "replaced by a backup": restored,
    "restored in place": restored_in_place,
    "its blocks removed": lambda folder: shutil.rmtree(folder / "blocks"),
    "its sessions removed": lambda folder: shutil.rmtree(folder / "sessions"),
    "a session removed": lambda folder: shutil.rmtree(folder / "sessions" / f"{NAME}.session"),
    "its marker removed": lambda folder: (folder / MARKER).unlink(),
}
UNNOTICED = ("its blocks removed", "its marker removed")
"""What is written again without a warning."""


def is_busy(folder: Path) -> int:
    """An exit code: whether another program is kept out of the session."""
    with suppress(SessionBusy):
        StoredSession(Store(folder), NAME, writing=True).close()
        return 1
    return 0


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["full", "h2o"])
@pytest.mark.parametrize("what", DISASTERS)
def test_an_open_session_is_saved_as_a_whole_where_the_store_is(
    what: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "parent" / "store"
    store_text(Store(folder), NAME, name, TURNS[0])
    shutil.copytree(folder, folder.with_name("backup"))
    store = Store(folder)
    with StoredSession(store, NAME, writing=True) as stored:
        for length in TURNS:
            stored.save(session(kept(name, length), length=length))
        DISASTERS[what](folder)
        stored.save(session(kept(name), length=TURNS[1]))
        assert len(caplog.records) == (what not in UNNOTICED), caplog.text
        assert exit_codes(lambda: sys.exit(is_busy(folder))) == [0]
        stored.save(session(kept(name), length=TURNS[1]))
        assert len(caplog.records) == (what not in UNNOTICED), caplog.text
    assert (folder / MARKER).read_bytes() == b"1\n"
    assert check_whole(Store(folder), NAME, name) == TURNS[1]
    store_text(Store(folder), NAME, name)  # a later program


def test_two_programs_have_one_lock_in_the_folder_that_is_there(tmp_path: Path) -> None:
    """The lock of a removed folder protects nothing: the first program that locks the new folder has the session."""
    folder = tmp_path / "store"
    with StoredSession(Store(folder), NAME, writing=True) as first:
        first.save(session(kept("full", TURNS[0]), length=TURNS[0]))
        shutil.rmtree(folder)
        with StoredSession(Store(folder), NAME, writing=True) as second:
            for _ in range(2):
                with pytest.raises(SessionBusy, match="in use by another program"):
                    first.save(session(kept("full"), length=TURNS[1]))
            second.save(session(kept("full", TURNS[0]), length=TURNS[0]))
        with pytest.raises(SessionBusy, match="continued"):  # its turn counts
            first.save(session(kept("full", TURNS[0]), length=TURNS[0]))
    assert check_whole(Store(folder), NAME, "full") == TURNS[0]


def test_a_folder_of_others_in_the_place_of_a_store_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with StoredSession(Store(folder), NAME, writing=True) as stored:
        stored.save(session(kept("full", TURNS[0]), length=TURNS[0]))
        folder.rename(tmp_path / "away")
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
        with pytest.raises(SessionUnwritable, match="holds other files"):
            stored.save(session(kept("full"), length=TURNS[1]))
        assert [path.name for path in files(folder)] == ["thesis.txt"]
        shutil.rmtree(folder)
        (tmp_path / "away").rename(folder)
        stored.save(session(kept("full"), length=TURNS[1]))
    assert check_whole(Store(folder), NAME, "full") == TURNS[1]


def test_a_store_written_without_its_marker_is_one(tmp_path: Path) -> None:
    """Earlier versions wrote such stores after a removal."""
    store_text(Store(tmp_path), NAME, "full")
    (tmp_path / MARKER).unlink()
    assert check_whole(Store(tmp_path), NAME, "full") == TURNS[1]
    store_text(Store(tmp_path), NAME, "full")
    assert (tmp_path / MARKER).exists()
