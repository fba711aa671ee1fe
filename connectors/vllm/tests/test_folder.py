"""Blocks in a folder: whole or not there, within the quota of all programs, the least recently used gone first."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kvkeep_vllm.folder import HEADER, LEDGER, BlockDamaged, BlockFolder, BlockMissing, BlockName

from kvkeep.errors import StoreError

SIZE = 1000
FILE = SIZE + HEADER.size


def name(number: int, space: str = "model/shared") -> BlockName:
    return BlockName(space, number.to_bytes(32, "big"))


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def filled(path: Path, count: int, blocks: int) -> BlockFolder:
    folder = BlockFolder(path, count * FILE)
    for number in range(blocks):
        folder.write(name(number), [payload(number)])
        folder.use(name(number), number)
    return folder


def test_any_flipped_byte_any_length_and_any_other_name_is_a_miss(tmp_path: Path) -> None:
    folder = filled(tmp_path / "made" / "here", 10, 2)
    path, good = folder.path(name(0)), folder.path(name(0)).read_bytes()
    assert bytes(folder.read(name(0))) == payload(0) and (tmp_path / "made" / "here").stat().st_mode & 0o077 == 0
    wrong = [good[:length] for length in (0, 7, HEADER.size, len(good) - 1)] + [good + b"x", b"\0" * len(good)]
    for place in (*range(HEADER.size), *random.Random(0).sample(range(HEADER.size, len(good)), 40)):
        wrong.append(good[:place] + bytes([good[place] ^ 1 << random.Random(place).randrange(8)]) + good[place + 1 :])
    wrong.append(folder.path(name(1)).read_bytes())  # another block's file
    for bad in wrong:
        path.write_bytes(bad)
        with pytest.raises(BlockDamaged):
            folder.read(name(0))
        with pytest.raises(BlockMissing):
            folder.read(name(0))  # it is gone, and is written anew
        assert not folder.has(name(0))
    for other in (name(0, "model/salt-1"), name(0, "other/shared")):  # nor is it read under another namespace
        folder.path(other).parent.mkdir(parents=True, exist_ok=True)
        folder.path(other).write_bytes(good)
        with pytest.raises(BlockDamaged):
            folder.read(other)
    os.mkfifo(folder.path(name(7)))
    with pytest.raises(BlockDamaged):  # nobody is waited for
        folder.read(name(7))


def test_what_was_used_stays_within_the_quota_however_it_was_left(tmp_path: Path) -> None:
    folder = filled(tmp_path, 32, 32)
    assert folder.count() == (32, 32 * FILE)
    folder.use(name(0), 100)
    assert folder.write(name(50), [payload(50)]) == 2  # a sixteenth of the quota at once
    assert [number for number in range(6) if folder.has(name(number))] == [0, 3, 4, 5]
    with pytest.raises(StoreError, match="does not fit into a quota"):
        folder.write(name(60), [bytes(40 * FILE)])
    for ledger in (b"", b"\0" * 8, b"\xff" * 8, b"odd"):  # whatever another program left there
        (tmp_path / LEDGER).write_bytes(ledger)
        other, before = BlockFolder(tmp_path, 32 * FILE), folder.count()[0]
        for number in range(100 * before, 100 * before + 40):
            other.write(name(number), [payload(number)])
            assert other.count()[1] <= 32 * FILE
    assert int.from_bytes((tmp_path / LEDGER).read_bytes(), "little") == folder.count()[1]
    folder.clear("model")
    assert folder.count() == (0, 0)


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
from kvkeep_vllm.folder import BlockFolder, BlockName
folder = BlockFolder(Path(sys.argv[2]), int(sys.argv[3]))
for number in range(150):
    name = BlockName(f"space-{int(sys.argv[4]) % 2}", (number // 2 * 1000).to_bytes(32, "big"))
    if number % 2:
        folder.write(name, [bytes(1000)])
    elif folder.has(name):
        try:
            assert bytes(folder.read(name)) == bytes(1000)
        except Exception as error:
            assert type(error).__name__ == "BlockMissing", error
"""


def test_programs_share_a_folder_and_its_quota(tmp_path: Path) -> None:
    """Four of them, which write the same and other blocks; one is killed."""
    root = Path(__file__).parents[3]
    source, quota = f"{root / 'src'}:{root / 'connectors/vllm/src'}", 20 * FILE
    arguments = [sys.executable, "-c", WRITER, source, str(tmp_path), str(quota)]
    running = [subprocess.Popen([*arguments, str(number)], stderr=subprocess.PIPE) for number in range(4)]
    folder, most, ended = BlockFolder(tmp_path, quota), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, folder.count()[1])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        running[0].kill()
        assert [(one.communicate()[1], one.returncode) for one in running[1:]] == [(b"", 0)] * 3
    finally:
        ended.set()
        watcher.join()
        running[0].communicate()
    assert 0 < most <= quota
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".kv", ""} and sum(path.suffix == "" for path in kept) == 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_leaves_no_file_and_no_count(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filled(tmp_path, 10, 2)

    def fails(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match=os.strerror(error)):
            folder.write(name(7), [payload(7)])
    assert not folder.has(name(7)) and folder.count()[0] == 2
    assert int.from_bytes((tmp_path / LEDGER).read_bytes(), "little") == folder.count()[1]
    assert folder.write(name(7), [payload(7)]) == 0 and bytes(folder.read(name(7))) == payload(7)
