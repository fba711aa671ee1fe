"""Blocks in a folder: whole or not there, within the quota of all programs, what is worth the least gone first."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.blocks.folder import HEADER, LOCK, MAGIC, BlockFolder, BlockName, encode
from kvkeep.errors import BlockDamaged, BlockMissing, StoreError
from kvkeep.memory.places import Device, place

SHAPE = (5, 50)
Block = dict[str, Tensor]


def name(number: int, space: str = "owner") -> BlockName:
    return BlockName(space, number.to_bytes(16, "big").hex())


def block(number: int) -> Block:
    generator = torch.Generator().manual_seed(number)
    return {
        "keys": torch.randn(SHAPE, generator=generator),
        "codes": torch.arange(33, dtype=torch.uint8) + number % 256,
    }


FILE = sum(map(len, encode(name(0).key, block(0))))


def same(one: Block, other: Block) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def filled(path: Path, count: int, blocks: int) -> BlockFolder:
    folder = BlockFolder(path, count * FILE)
    for number in range(blocks):
        folder.write(name(number), block(number))
        os.utime(folder.path(name(number)), ns=(number, number))
    return folder


def test_any_flipped_byte_any_length_and_any_other_name_is_a_miss(tmp_path: Path) -> None:
    folder = filled(tmp_path / "made" / "here", 10, 2)
    path, good = folder.path(name(0)), folder.path(name(0)).read_bytes()
    assert len(good) == FILE and (tmp_path / "made" / "here").stat().st_mode & 0o077 == 0
    flipped = [good[:place] + bytes([byte ^ 1 << place % 8]) + good[place + 1 :] for place, byte in enumerate(good)]
    wrong = [good[:length] for length in (0, 7, 16, len(good) // 2, len(good) - 1)] + [good + b"x", b"\0" * len(good)]
    wrong.append(folder.path(name(1)).read_bytes())  # another block's file
    misses = 0
    for bad in flipped + wrong:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bad)
        try:
            assert same(folder.read(name(0)), block(0)) and bad in flipped  # a byte between tensors
        except BlockDamaged:
            with pytest.raises(BlockMissing):
                folder.read(name(0))  # it is gone, and is written anew
            assert not folder.has(name(0))
            misses += 1
    assert misses > len(wrong) + 4 * SHAPE[0] * SHAPE[1]
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(BlockMissing, match="there is a pipe"):  # nobody is waited for
        folder.read(name(0))


HOMES = ["device", "host", "disk"]


@pytest.mark.parametrize("where", HOMES)
def test_a_block_is_read_once_and_compared_whenever_it_is_taken(where: str, tmp_path: Path) -> None:
    folder, home = filled(tmp_path / "store", 4, 4), place(where, torch.device("cpu"), tmp_path)
    first, again = folder.read(name(0), home), folder.read(name(0), home)
    assert first["keys"].data_ptr() == again["keys"].data_ptr() and first["keys"].data_ptr() % 64 == 0
    address = first["keys"].data_ptr()
    first["keys"].zero_()  # of what another cache holds
    assert same(folder.read(name(0), home), block(0)) and address != folder.read(name(0), home)["keys"].data_ptr()
    folder.remove(name(0))
    assert same(folder.read(name(1), home), block(1)) and not folder.has(name(0))
    with pytest.raises(BlockMissing):
        folder.read(name(0), home)


@pytest.mark.parametrize("where", HOMES)
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "replaced", "removed", "grown"])
def test_whatever_happens_to_a_file_that_was_read_nothing_happens_to_its_tensors(
    damage: str, where: str, tmp_path: Path
) -> None:
    folder, home = filled(tmp_path / "store", 4, 2), place(where, torch.device("cpu"), tmp_path)
    path, held = folder.path(name(0)), folder.read(name(0), home)
    if damage == "truncated":
        os.truncate(path, 0)
    elif damage == "overwritten":
        with open(path, "r+b") as file:
            file.write(b"\xaa" * FILE)
    elif damage == "replaced":
        os.replace(folder.path(name(1)), path)
    elif damage == "removed":
        path.unlink()
    else:
        os.truncate(path, 100 * FILE)
    assert same(held, block(0))
    assert same(folder.read(name(0), home), block(0))  # what is held is still what was written
    del held
    with pytest.raises((BlockDamaged, BlockMissing)):
        folder.read(name(0), home)


def test_a_file_that_claims_more_than_it_has_is_no_reason_to_allocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filled(tmp_path, 10, 1)
    path = folder.path(name(0))
    os.truncate(path, 1 << 40)  # it is sparse

    def allocates(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Device, "allocate", allocates)
    with pytest.raises(BlockDamaged, match="longer than was written"):
        folder.read(name(0))
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    with pytest.raises(BlockMissing):
        folder.read(name(0))
    assert victim.read_bytes() == b"mine"


def test_what_was_used_stays_within_the_quota_however_it_was_left(tmp_path: Path) -> None:
    folder = filled(tmp_path, 32, 32)
    assert folder.count() == (32, 32 * FILE)
    folder.use([name(0)], 100)
    assert folder.write(name(50), block(50)) == 2  # a sixteenth of the quota at once
    assert [number for number in range(6) if folder.has(name(number))] == [0, 3, 4, 5]
    with pytest.raises(StoreError, match="does not fit into a quota"):
        folder.write(name(60), {"keys": torch.zeros(40 * FILE)})
    for left in (b"", b"\0" * 8, b"\xff" * 40, (tmp_path / LOCK).read_bytes()):  # whatever another program left there
        (tmp_path / LOCK).write_bytes(left)
        other, before = BlockFolder(tmp_path, 32 * FILE), folder.count()[0]
        for number in range(100 * before, 100 * before + 40):
            (other if number % 7 else folder).write(name(number), block(number))
            assert other.count()[1] <= 32 * FILE
    for one in folder.names():
        folder.remove(one)
    assert folder.count() == (0, 0)


def test_the_blocks_of_a_text_are_used_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    folder = filled(tmp_path, 10, 4)
    folder.remove(name(2))
    assert folder.use([name(number) for number in range(4)], 1000) == 2
    assert folder.names() == [name(3), name(1), name(0)]  # what others build upon goes last
    assert folder.evict(60) == 3 and folder.count() == (0, 0)
    assert BlockFolder(tmp_path / "none").evict(60) == 0 and not (tmp_path / "none").exists()


def write(folder: Path, quota: int, number: int) -> None:
    """A program that writes blocks and reads some."""
    shared = BlockFolder(folder, quota)
    for at in range(150):
        one = BlockName(f"space-{number % 2}", (at // 2 * 1000).to_bytes(16, "big").hex())
        if at % 2:
            shared.write(one, block(0))
        elif shared.has(one):
            with suppress(BlockMissing):
                assert same(shared.read(one), block(0))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_leaves_no_file_and_no_count(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filled(tmp_path, 10, 2)

    def fails(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(StoreError, match=os.strerror(error).lower()):
            folder.write(name(7), block(7))
    assert not folder.has(name(7)) and folder.count()[0] == 2
    assert folder.write(name(7), block(7)) == 0 and same(folder.read(name(7)), block(7))


def test_a_disk_that_cannot_be_read_is_a_miss_and_ends_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filled(tmp_path, 10, 1)

    class Failing(io.FileIO):
        def readinto(self, *_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", lambda handle, _: Failing(handle))
        with pytest.raises(BlockMissing, match="input/output error"):
            folder.read(name(0))
    assert same(folder.read(name(0)), block(0))


def test_a_description_of_infinite_length_is_damage(tmp_path: Path) -> None:
    folder = filled(tmp_path, 10, 1)
    description = b'{"bytes": Infinity}'
    header = HEADER.pack(MAGIC, len(description), zlib.crc32(description))
    folder.path(name(0)).write_bytes(header + description)
    with pytest.raises(BlockDamaged, match="invalid description"):
        folder.read(name(0))


def test_it_needs_no_transformers() -> None:
    """It also runs in vLLM's environment, which has an older version."""
    code = "import sys; sys.modules['transformers'] = None; import kvkeep.blocks.folder"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


def test_a_lock_that_memory_ran_out_for_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path, 10, 1)

    def failing(*given: Any, **own: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvkeep.blocks.folder.os.fdopen", failing)
        with pytest.raises((MemoryError, StoreError)):
            folder.write(name(1), block(1))
    folder.write(name(1), block(1))  # does not wait for this process itself
    assert same(folder.read(name(1)), block(1))
