"""Files are there whole or as they were, whatever becomes of the process that writes them."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from kvkeep.files.atomic import STALE_S, owner, write_whole

SLOW = """
import os, sys, time
from kvkeep.files import atomic

def slowly(file):
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)

atomic.write_whole(sys.argv[1], slowly)
"""


def put(path: Path, text: bytes) -> None:
    write_whole(path, lambda file: file.write(text))  # type: ignore[arg-type, return-value]


def test_modes_and_links_are_kept(tmp_path: Path) -> None:
    """Session files used to become private, and links files."""
    folder, link = tmp_path / "elsewhere", tmp_path / "link"
    folder.mkdir()
    before = os.umask(0o027)
    try:
        put(folder / "file", b"one")
        assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o640
    finally:
        os.umask(before)
    (folder / "file").chmod(0o644)
    link.symlink_to(Path("elsewhere") / "file")
    put(link, b"two")
    assert link.is_symlink() and (folder / "file").read_bytes() == b"two"
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o644
    (folder / "file").unlink()
    put(link, b"three")  # a link to nothing
    assert link.is_symlink() and (folder / "file").read_bytes() == b"three"


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_what_fails_leaves_what_was_there(tmp_path: Path, fault: BaseException) -> None:
    def fails(file: IO[bytes]) -> None:
        file.write(b"half")
        raise fault

    put(tmp_path / "file", b"before")
    with pytest.raises(type(fault)):
        write_whole(tmp_path / "file", fails)
    assert (tmp_path / "file").read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]


def test_only_files_are_replaced(tmp_path: Path) -> None:
    for path in (tmp_path, Path(os.devnull)):
        with pytest.raises(OSError):
            put(path, b"one")
    assert not Path(os.devnull).is_file()


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


def test_a_file_of_any_name_is_made_and_replaced(tmp_path: Path) -> None:
    for name in ("file", "a" * 255, "ü" * 127, ".hidden", "with space [x]*"):
        for text in (b"one", b"two"):
            put(tmp_path / name, text)
            assert (tmp_path / name).read_bytes() == text and os.listdir(tmp_path) == [name]
        (tmp_path / name).unlink()
