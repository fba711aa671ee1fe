"""The quota of a folder of blocks holds at every moment."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from kvkeep.blocks.folder import BlockFolder, BlockName
from kvkeep.errors import BlockMissing

EACH = 20_000
"""Bytes of a block, roughly."""


def block(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((EACH,), number % 251, dtype=torch.uint8)}


def sizes(folder: Path) -> dict[str, int] | None:
    """Return the sizes of all blocks at one moment; None if they changed while they were read."""

    def once() -> dict[str, int]:
        found = {}
        for path in folder.rglob("*.block"):
            try:
                found[path.name] = path.stat().st_size
            except FileNotFoundError:
                return {}
        return found

    first = once()
    return first if first and first == once() else None


@pytest.mark.parametrize("dies", [False, True])
def test_it_holds_at_every_moment_under_eight_writers(dies: bool, tmp_path: Path) -> None:
    """Also if writers are killed: what they left is counted by the next ones."""
    quota, read = 12 * EACH, BlockName("a", "f" * 32)
    folder = BlockFolder(tmp_path, quota)
    folder.write(read, block(7))
    tensors = folder.read(read)

    def write(writer: int) -> None:
        own = BlockFolder(tmp_path, quota)
        for number in range(25):
            name = BlockName(f"space{writer % 3}", f"{1000 * writer + number:032x}")
            own.write(name, block(number))
            with suppress(BlockMissing):  # another one needed the room
                assert int(own.read(name)["a"][5]) == number % 251

    processes = [get_context("fork").Process(target=partial(write, writer)) for writer in range(8)]
    for process in processes:
        process.start()
    looked = 0
    while any(process.is_alive() for process in processes):
        if (found := sizes(tmp_path)) is not None:
            assert sum(found.values()) <= quota
            looked += 1
        if dies and looked > 3:
            for process in processes[::2]:
                process.kill()
        time.sleep(0.002)
    for process in processes:
        process.join()
        assert process.exitcode in ((0, -9) if dies else (0,))
    assert looked and int(tensors["a"][EACH - 1]) == 7
    BlockFolder(tmp_path, quota).write(BlockName("a", "e" * 32), block(1))
    count, total = folder.count()
    assert total <= quota and count > 6
