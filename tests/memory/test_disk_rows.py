"""A disk that fails under a checkpoint: no wrong bits, and no process ends."""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import exit_codes
from storing import IDS, model, next_logits, step

from kvkeep import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.errors import EntriesLost
from kvkeep.memory import places
from kvkeep.memory.pages import PagedRows
from kvkeep.memory.places import Disk
from kvkeep.native import library

pytestmark = pytest.mark.usefixtures("kernels")

METHODS: dict[str, dict[str, Any]] = {
    "kv-direct": {"checkpoint": "kv"},
    "kv-direct residual": {"checkpoint": "residual"},
    "snapkv+verified": {},
    "endless+passages:count=2,size=128,exact=300": {"chunk": 32},
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Descriptors of all files that are mapped meanwhile: what a disk could do to them."""
    found: list[int] = []
    honest = places.map_file

    def noting(descriptor: int, size: int) -> Any:
        found.append(os.dup(descriptor))
        return honest(descriptor, size)

    monkeypatch.setattr(places, "map_file", noting)
    yield found
    for one in found:
        os.close(one)


def cut_short(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)


def overwritten(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    place = random.Random(size).randrange(size // 2) // 8 * 8
    old = os.pread(descriptor, 8, place)
    os.pwrite(descriptor, bytes(byte ^ 0x40 for byte in old), place)


def filled(method: str, folder: Path, length: int = 530) -> KeepCache:
    cache = KeepCache(model(), method.partition(" ")[0], 32, where="disk", folder=folder, **METHODS[method])
    step(model(), cache, IDS[:, :length])
    return cache


def test_a_file_that_cannot_be_read_is_zeros_and_known_and_others_are_not(tmp_path: Path, opened: list[int]) -> None:
    first, second = (Disk(tmp_path).allocate((4, 4096), torch.float32).fill_(3) for _ in range(2))
    before = library.lost_files()
    os.ftruncate(opened[0], 4096)
    assert float(first[1:].sum()) == 0 and float(second.sum()) == 3 * second.numel()
    assert library.lost_files() == before + 1
    assert library.is_lost(first.data_ptr()) and library.is_lost(first[3].data_ptr())
    assert not library.is_lost(second.data_ptr()) and not library.is_lost(torch.zeros(1).data_ptr())
    del first
    again = [Disk(tmp_path).allocate((4, 4096), torch.float32) for _ in range(3)]
    assert not any(library.is_lost(one.data_ptr()) for one in again)  # at the same address


def test_other_bus_errors_still_end_the_process(tmp_path: Path, opened: list[int]) -> None:
    """The handler is for kvkeep's own files."""
    import mmap
    import signal

    def reads_another_file() -> None:
        faulthandler.disable()
        Disk(tmp_path).allocate((64,), torch.float32)
        with open(tmp_path / "other", "w+b") as file:
            file.truncate(8192)
            mapped = mmap.mmap(file.fileno(), 8192)
            file.truncate(0)
            mapped[0]

    def is_sent_one() -> None:
        faulthandler.disable()
        Disk(tmp_path).allocate((64,), torch.float32)
        os.kill(os.getpid(), signal.SIGBUS)

    def has_other_handlers() -> None:
        """Of which one leads back to the other."""
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        for _ in range(2):
            faulthandler.enable(nowhere)
            Disk(tmp_path).allocate((64,), torch.float32)
            faulthandler.disable()
        faulthandler.enable(nowhere)
        tensor = Disk(tmp_path).allocate((64,), torch.float32)
        os.ftruncate(opened[-1], 0)
        assert float(tensor.sum()) == 0
        os.kill(os.getpid(), signal.SIGBUS)

    ends = exit_codes(reads_another_file, is_sent_one, has_other_handlers)
    assert ends == [-signal.SIGBUS] * 3


@pytest.mark.turns(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("damage", [cut_short, overwritten])
def test_a_text_whose_entries_are_lost_is_read_again(
    damage: Callable[[int], None], method: str, tmp_path: Path, opened: list[int]
) -> None:
    """Between two answers: the next one begins with the text's first token, and has the right bits."""
    cache = filled(method, tmp_path)
    wanted = next_logits(filled(method, tmp_path))
    for descriptor in opened:
        damage(descriptor)
    CachedText(cache, IDS[0, :530].tolist()).align(IDS[0, :533].tolist())
    if cache.exact_tokens is not None:  # they are compared when they are recalled
        with pytest.raises(EntriesLost):
            step(model(), cache, IDS[:, 530:540])
        cache.reset()
    assert cache.get_seq_length() == 0
    step(model(), cache, IDS[:, :530])
    assert torch.equal(next_logits(cache), wanted)


@pytest.mark.parametrize("method", METHODS)
def test_a_disk_that_fails_within_a_pass_fails_the_pass_and_all_after_it(
    method: str, tmp_path: Path, opened: list[int]
) -> None:
    cache = filled(method, tmp_path)
    for descriptor in opened:
        cut_short(descriptor)
    for _ in range(2):
        with pytest.raises(EntriesLost, match=r"has to be read again\. Check the disk"):
            next_logits(cache)
    for act in (cache.fork, lambda: cache.crop(-3)):
        with pytest.raises(EntriesLost):
            act()
    cache.reset()
    step(model(), cache, IDS[:, :530])
    assert torch.equal(next_logits(cache), next_logits(filled(method, tmp_path)))


COPIES: dict[str, Callable[[KeepCache], Any]] = {
    "rows of the batch": lambda cache: cache.reorder_cache(torch.tensor([0, 0])),
    "fork": lambda cache: cache.fork(),
    "fork of another method": lambda cache: cache.fork("full"),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("damage", [cut_short, overwritten])
def test_what_is_copied_from_disk_is_compared_first(
    damage: Callable[[int], None], copy: str, method: str, tmp_path: Path, opened: list[int]
) -> None:
    """Nobody could tell afterwards: the copy has digests of its own, or is in memory."""
    if copy == "fork of another method" and method.startswith("endless"):
        pytest.skip("its entries cannot be moved into an exact cache")
    cache = filled(method, tmp_path)
    for descriptor in opened:
        damage(descriptor)
    with pytest.raises(EntriesLost):
        COPIES[copy](cache)
    with pytest.raises(EntriesLost):
        next_logits(cache)


def test_every_changed_word_of_a_complete_block_is_noticed(tmp_path: Path) -> None:
    rows, draw = PagedRows(Disk(tmp_path), 4, 8), random.Random(1)
    rows.append(torch.randn(2, 22, 6))
    rows.truncate(19)
    for _ in range(3):
        rows.advance()  # as where the library writes a row
    changed = [page.clone() for page in rows.pages]
    assert not rows.damaged(compare=True)
    for number, page in enumerate(rows.pages):
        words = page.view(torch.int32)
        for _ in range(200):
            lane, row, column = (draw.randrange(size) for size in words.shape)
            words[lane, row, column] ^= 1 << draw.randrange(31)
            complete = rows.starts[number] + row < 20
            assert rows.damaged(compare=True) == complete and not rows.damaged(compare=False)
            page.copy_(changed[number])
        if number < 2:  # rows that change their places
            page.copy_(page.flip(1))
            assert rows.damaged(compare=True)
            page.copy_(changed[number])
    rows.select(torch.tensor([1, 1, 0]))
    assert not rows.damaged(compare=True)
