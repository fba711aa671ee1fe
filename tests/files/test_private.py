"""What kvkeep writes only its user can read, whatever the umask; and no link is followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import tiny
from helpers import prompt, step

from kvkeep import KeepCache, Session
from kvkeep.blocks import archive
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.cli.chat.screen import _history
from kvkeep.files.private import check_kind, holds, make_folder, open_file, wait_for_lock
from kvkeep.memory.places import Disk
from kvkeep.models.checksum import remembered_sha256
from kvkeep.serve.http.keys import kept_key


@pytest.fixture(params=[0, 0o022, 0o777], ids="umask {:04o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """The modes of what lies in a folder, as far as they are not those of a private file or folder."""
    found = {str(path.relative_to(folder)): path.lstat().st_mode for path in folder.rglob("*")}
    return {
        name: mode for name, mode in found.items() if stat.S_IMODE(mode) != (0o700 if stat.S_ISDIR(mode) else 0o600)
    }


def test_whatever_is_written_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    root = tmp_path / "root"
    make_folder(root)
    for variable in ("KVKEEP_DATA", "KVKEEP_CACHE"):
        monkeypatch.setenv(variable, str(root / variable / "one" / "two"))
    cache = KeepCache(tiny("llama"), "full")
    step("llama", cache, prompt(1, 300))
    named = Store(root / "a" / "b" / "store")
    for one in (named, Store(root / "c" / "other")):
        for name in ("talk", "me/talk"):
            with StoredSession(one, name, writing=True) as stored:
                stored.save(Session(cache, prompt(1, 300).tolist()))
                stored.save(Session(cache, prompt(1, 300).tolist()))
        with one.open("me/open"):
            assert modes(root) == {}
    archive.export(named, "me/talk", root / "talk.tar")
    archive.add(root / "talk.tar", named, "me/again")
    assert kept_key()[0] == kept_key()[0]
    _history()
    remembered_sha256(root / "talk.tar")
    Disk().allocate((3,), torch.float32)
    assert modes(root) == {} and len([*root.rglob("*")]) > 30


def test_a_store_that_is_open_to_others_is_closed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Store(tmp_path / "store").create()
    (tmp_path / "store").chmod(0o777)
    for _ in range(2):
        Store(tmp_path / "store").create()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert [one.getMessage() for one in caplog.records] == [
        f"The folder '{tmp_path / 'store'}' was open to other users (mode 0777), and is closed to them."
    ]


def test_a_folder_below_another_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    for place in ("link", "link/a", "link/a/b"):
        with pytest.raises(OSError, match="'link' there is a link and not a folder of kvkeep"):
            make_folder(tmp_path / "root" / place, tmp_path / "root")
    assert not os.listdir(tmp_path / "elsewhere")
    make_folder(tmp_path / "root" / "link" / "a")  # the caller trusts it


def test_files_of_other_kinds_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nothing").symlink_to("none")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("link", "a link"), ("nothing", "a link"), ("pipe", "a pipe"), (".", "a folder")):
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError, match=f"there is {kind} and not a file"):
                open_file(tmp_path / name, flags)
    check_kind(tmp_path / "none")
    assert not (tmp_path / "none").exists() and (tmp_path / "file").read_bytes() == b"mine"


def test_a_lock_is_that_of_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    handle = open_file(path, os.O_RDWR | os.O_CREAT)
    assert holds(handle, path)
    path.unlink()
    assert not holds(handle, path)
    path.touch()
    assert not holds(handle, path)
    os.close(handle)
    os.link(path, other := tmp_path / "other")
    handle = wait_for_lock(path)
    assert holds(handle, path) and not path.samefile(other) and other.stat().st_nlink == 1
    os.close(handle)
