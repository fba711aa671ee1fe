"""Files are there whole or as they were, and only their user can read them."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from families import tiny
from helpers import prompt, step

from kvkeep import KeepCache, Session
from kvkeep.blocks import archive
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.cli.chat.screen import _history
from kvkeep.files import STALE_S, make_folder, owner, write_whole
from kvkeep.memory.places import Disk
from kvkeep.models.checksum import remembered_sha256
from kvkeep.serve.http.keys import kept_key

SLOW = """
import os, sys, time
from kvkeep.files import write_whole

def slowly(file):
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)

write_whole(sys.argv[1], slowly)
"""


def put(path: Path, text: bytes) -> None:
    write_whole(path, lambda file: file.write(text))  # type: ignore[arg-type, return-value]


def test_a_link_is_neither_followed_nor_replaced(tmp_path: Path) -> None:
    put(tmp_path / "file", b"one")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="Not a regular file"):
        put(tmp_path / "link", b"two")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"one"


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_what_fails_leaves_what_was_there(tmp_path: Path, fault: BaseException) -> None:
    def fails(file: IO[bytes]) -> None:
        file.write(b"half")
        raise fault

    put(tmp_path / "file", b"before")
    with pytest.raises(type(fault)):
        write_whole(tmp_path / "file", fails)
    assert (tmp_path / "file").read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_a_killed_write_leaves_nothing_for_long(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, b"before")
    command = [sys.executable, "-c", SLOW, str(path)]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
            process.send_signal(signal.SIGKILL)
        assert path.read_bytes() == b"before"
        left = sorted(os.listdir(tmp_path))
        assert left[-1] == "file" and len(left) == 2
        assert all(name.startswith(".file.saving-") for name in left[:-1])
    put(path, b"after")
    assert path.read_bytes() == b"after" and os.listdir(tmp_path) == ["file"]


def test_what_others_write_is_left_to_them(tmp_path: Path) -> None:
    """Another process that is alive, another host, another file."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive, elsewhere = f".file.saving-1-{owner()}", f".file.saving-1-else-where-{dead.pid}"
    forgotten, another = ".file.saving-1-else-where-7", f".file2.saving-1-{owner().rsplit('-', 1)[0]}-{dead.pid}"
    old = f".file.saving-1-{owner().rsplit('-', 1)[0]}-{os.getppid()}"
    for name in (alive, elsewhere, forgotten, another, old):
        (tmp_path / name).touch()
    long_ago = time.time() - 2 * STALE_S
    for name in (forgotten, old):  # somebody may have set the clock
        os.utime(tmp_path / name, (long_ago, long_ago))
    for text in (b"one", b"two"):  # theirs are searched where a file is replaced
        put(tmp_path / "file", text)
    assert set(os.listdir(tmp_path)) == {"file", alive, elsewhere, another, old}


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
