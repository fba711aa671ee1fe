"""Blocks from the cache's tensors to files and back: copied, encoded, written by a thread, loaded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvkeep_vllm import writer as writer_module
from kvkeep_vllm.codec import BlockCodec, ExactCodec, QuantizedCodec, places
from kvkeep_vllm.loader import BlockLoader
from kvkeep_vllm.tensors import BlockTensors
from kvkeep_vllm.transfers import Load, Use, name_of
from kvkeep_vllm.writer import BlockWriter, Counts
from torch import Tensor

from kvkeep.blocks.folder import BlockFolder, BlockName
from kvkeep.errors import StoreError, UsageError

HEADS, ENTRIES, DIM = 2, 64, 32


def name(number: int) -> BlockName:
    return name_of("model/shared", bytes([number]) * 32)


def caches(dtype: torch.dtype = torch.bfloat16, blocks: int = 5) -> dict[str, Tensor]:
    shape, random = (blocks, HEADS, ENTRIES, 2 * DIM), torch.Generator().manual_seed(1)
    return {f"layer.{number}": torch.randn(shape, generator=random).to(dtype) for number in range(3)}


def in_pairs(keys: Tensor, values: Tensor, key_half: Tensor, value_half: Tensor) -> None:
    """As a processor might want them: keys by channel, two of them together; values as they are, entries reversed."""
    key_half.copy_(keys.permute(1, 2, 0).reshape(HEADS, DIM // 2, 2, ENTRIES).transpose(2, 3).reshape(key_half.shape))
    value_half.copy_(values.flip(0).transpose(0, 1))


def test_a_block_is_all_layers_bytes_and_goes_back_to_any_place() -> None:
    own = caches() | {"tied": torch.zeros(0)}
    own["tied"] = own["layer.1"]  # a layer that shares another one's entries
    tensors = BlockTensors(own)
    assert tensors.names == ["layer.0", "layer.1", "layer.2"] and tensors.nbytes == 3 * HEADS * ENTRIES * 2 * DIM * 2
    codec = ExactCodec(tensors.nbytes)
    stored = codec.encode(tensors.read(1))
    before = [own[layer][1].clone() for layer in tensors.names]
    tensors.write(4, codec.decode(stored))
    assert all(torch.equal(own[layer][4], kept) for layer, kept in zip(tensors.names, before, strict=True))
    for odd in (
        {},
        {"block": stored["block"][1:]},
        {"block": stored["block"].float()},
        stored | {"more": stored["block"]},
    ):
        with pytest.raises(StoreError, match="other shapes than this engine's"):
            codec.decode(odd)
    with pytest.raises(UsageError, match="each block in one piece"):
        BlockTensors({"layer": torch.zeros(4, 8, 6).transpose(1, 2)})
    with pytest.raises(UsageError, match="on the CPU; this one is on 'meta'"):
        BlockTensors({"layer": torch.zeros(4, 8, device="meta")})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_those_of_quantize_in_any_order_of_a_processor(bits: int, dtype: torch.dtype) -> None:
    """Each number is within half a step of its group's range: keys by channel and 32 entries, values by entry and 32
    channels."""
    random = torch.Generator().manual_seed(2)
    own = {f"layer.{number}": torch.zeros(3, HEADS, ENTRIES, 2 * DIM, dtype=dtype) for number in range(2)}
    keys, values = (torch.randn(2, ENTRIES, HEADS, DIM, generator=random).to(dtype) for _ in range(2))
    for number, cache in enumerate(own.values()):
        halves = cache.view(3, HEADS, 2, ENTRIES, DIM)
        in_pairs(keys[number], values[number], halves[1, :, 0], halves[1, :, 1])
    tensors = BlockTensors(own)
    codec = QuantizedCodec(bits, tensors, in_pairs)
    stored = codec.encode(tensors.read(1))
    assert sum(part.nbytes for part in stored.values()) == 4 * HEADS * ENTRIES * DIM * (bits / 8 + 4 / 32)
    tensors.write(2, codec.decode(stored))
    key_order, value_order = places(HEADS, ENTRIES, DIM, dtype, in_pairs)
    for number, cache in enumerate(own.values()):
        halves = cache[2].view(HEADS, 2, ENTRIES * DIM)
        for half, order, whole, axis in ((0, key_order, keys, 0), (1, value_order, values, 2)):
            read = halves[:, half, order].view(HEADS, ENTRIES, DIM).transpose(0, 1).float()
            exact = whole[number].float()
            groups = exact.unflatten(axis, (-1, 32))
            steps = (groups.amax(axis + 1) - groups.amin(axis + 1)) / (2**bits - 1)
            error = (read - exact).abs().unflatten(axis, (-1, 32)).amax(axis + 1)
            slack = 2**-9 * exact.abs().max()  # scale and offset are half precision, and so may the numbers be
            assert (error <= steps / 2 + slack).all() and error.max() > steps.min() / 8


def test_an_order_that_is_none_is_refused() -> None:
    def loses(keys: Tensor, values: Tensor, key_half: Tensor, value_half: Tensor) -> None:
        key_half.copy_(keys.transpose(0, 1).abs().clamp(max=3))
        value_half.copy_(values.transpose(0, 1))

    def by_head(keys: Tensor, values: Tensor, key_half: Tensor, value_half: Tensor) -> None:
        key_half.copy_(keys.transpose(0, 1))
        key_half[1] = key_half[1].flip(0)
        value_half.copy_(values.transpose(0, 1))

    for store in (loses, by_head):
        with pytest.raises(UsageError, match="is unknown; use codec 'exact'"):
            places(HEADS, ENTRIES, DIM, torch.float32, store)
    mixed = {"a": torch.zeros(2, 2, 64, 64), "b": torch.zeros(2, 2, 64, 32)}
    for odd in (mixed, {"a": torch.zeros(2, 64, 64)}, {"a": torch.zeros(2, 2, 64, 64, dtype=torch.uint8)}):
        with pytest.raises(UsageError, match="use codec 'exact'"):
            QuantizedCodec(8, BlockTensors(odd), in_pairs)


# -- writing ---------------------------------------------------------------------------------------------


class Slow(BlockFolder):
    """Waits before it writes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 10**6)
        self.gate = threading.Event()

    def write(self, *arguments: Any, **options: Any) -> int:
        self.gate.wait(10)
        return super().write(*arguments, **options)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., BlockWriter]]:
    made: list[BlockWriter] = []

    def make(folder: BlockFolder, capacity: int = 10**6) -> BlockWriter:
        made.append(BlockWriter(folder, lambda raw: {"block": raw}, capacity, Counts()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_full_queue_drops_and_never_waits(tmp_path: Path, writer: Callable[..., BlockWriter]) -> None:
    folder, copies = Slow(tmp_path), []

    def copy() -> Tensor:
        copies.append(1)
        return torch.zeros(100, dtype=torch.uint8)

    queue, start = writer(folder, 350), time.monotonic()
    assert [queue.offer(name(number), 100, copy) for number in (0, 1, 2, 3, 1)] == [True, True, True, False, True]
    assert time.monotonic() - start < 5 and len(copies) == 3 and queue.counts.dropped == 1
    queue.use(Use([name(0), name(1), name(2)], time.time_ns()))
    folder.gate.set()
    assert queue.flush(10) and queue.counts.saved == 3
    times = [folder.path(name(number)).stat().st_mtime_ns for number in range(3)]
    assert times == sorted(times, reverse=True)  # what others build upon goes last
    assert queue.offer(name(3), 100, copy)
    queue.close()  # what is queued is written
    assert folder.count()[0] == 4 and not queue.offer(name(4), 100, copy)


def test_what_an_end_does_not_write_is_counted(
    tmp_path: Path, writer: Callable[..., BlockWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CLOSE_TIMEOUT_S", 0.05)
    folder = Slow(tmp_path)
    queue = writer(folder)
    assert all(queue.offer(name(number), 100, lambda: torch.zeros(100, dtype=torch.uint8)) for number in range(3))
    queue.close()  # one is being written
    assert queue.counts.dropped == 2
    folder.gate.set()
    assert queue.flush(5)  # a second end has nothing to wait for


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError()], ids=str)
def test_a_disk_that_fails_costs_blocks_and_nothing_else(
    error: Exception, tmp_path: Path, writer: Callable[..., BlockWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, raw = BlockFolder(tmp_path, 10**6), torch.zeros(100, dtype=torch.uint8)
    queue = writer(folder)

    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        assert queue.offer(name(0), 100, lambda: raw) and queue.flush(10)
    assert not queue.offer(name(1), 100, lambda: raw)  # for a while
    assert (queue.counts.failed, queue.counts.dropped, queue.counts.saved) == (1, 2, 0)
    monkeypatch.setattr(queue, "_paused", 0.0)
    assert queue.offer(name(0), 100, lambda: raw) and queue.flush(10) and folder.has(name(0))
    assert writer_module.PAUSE_S >= 1


def test_the_first_bad_block_and_all_behind_it_are_reported_with_their_request(tmp_path: Path) -> None:
    tensors, folder, counts = BlockTensors(caches(blocks=8)), BlockFolder(tmp_path, 10**8), Counts()
    codec: BlockCodec = ExactCodec(tensors.nbytes)
    for number in range(4):
        folder.write(name(number), codec.encode(tensors.read(number)))
    path = folder.path(name(2))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    folder.write(name(9), {"of another form": torch.zeros(9)})
    loader = BlockLoader(folder, codec, tensors, counts)
    try:
        wanted = {"bad": ([0, 1, 2, 3], [4, 5, 6, 7]), "odd": ([9], [3]), "gone": ([7], [2]), "good": ([3], [7])}
        for request, (keys, blocks) in wanted.items():
            loader.start(Load(request, [name(key) for key in keys], blocks))
        done: set[str] = set()
        bad: set[int] = set()
        until = time.monotonic() + 10
        while len(done) < 4 and time.monotonic() < until:
            new = loader.finished()
            assert not new[1] or new[0]  # bad blocks never come after their request
            done, bad = done | new[0], bad | new[1]
    finally:
        loader.close()
    assert done == {*wanted} and bad == {6, 7, 3, 2}
    assert torch.equal(tensors.read(4), tensors.read(0)) and torch.equal(tensors.read(5), tensors.read(1))
    assert counts.loaded == 3 and counts.bad == 3 and not folder.has(name(2))
