"""Checkpoint kind ``kv`` in host memory, for a model on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.contracts.entries import Piece
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.pinned import PinnedRows
from kvkeep.memory.places import Place
from kvkeep.memory.rows import BLOCK, Rows
from kvkeep.stores.checkpoints.spec import CheckpointSpec

SHARE = 8
"""A block, and in most cases the buffers, have at most 1/SHARE of the budget's entries."""
LONGEST = 8192
"""Entries of one layer in the largest buffer. Copying them takes as long as several layers compute."""
BUFFERS = 3
ALIGNED = 64
"""Elements in a multiple of which a buffer begins: kernels read units of 16 bytes."""


class StagedCheckpoint(Checkpoint):
    """A checkpoint of entries in pinned memory. Attention reads copies of them, some at a time, in buffers on the
    device, which are a part of the budget.

    entries: the budget of each layer. Without one, a buffer has ``page`` entries of a layer.
    """

    by_token = False
    copies = True
    replays = False
    capacity = None

    def __init__(
        self, home: Place, device: torch.device, geometry: ModelGeometry, spec: CheckpointSpec, entries: int, page: int
    ) -> None:
        self.home, self.device, self.spec = home, device, spec
        self.staged = staged_entries(entries, geometry, page)
        self.block = evicted_together(entries - self.staged)
        self._rows = dict[int, PinnedRows]()
        self._staging = Staging(device, self._rows, buffer_elements(geometry, self.staged, page))
        for layer in geometry.full_layers:
            self._rows[layer.index] = PinnedRows(layer.key_dim, layer.value_dim, self._staging.wait)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._staging.write(layer, keys, values)

    def rows(self, layer: int) -> tuple[Rows, Rows]:
        both = self._rows[layer]
        return both.keys, both.values

    def pieces(self, layer: int, stop: int, lazy: bool = False) -> Iterator[Piece]:
        """Yield copies on the device. Each is overwritten when the next but one is yielded."""
        for start, keys, values in self._staging.read(layer, stop):
            yield Piece(keys[:, None], values[:, None], first=start, formed=True)

    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rows[layer]
        keys, values = rows.pick(lane, slot).to(self.device).split([rows.keys.width, rows.values.width], 1)
        return keys, values

    def length(self, layer: int) -> int:
        return self._rows[layer].length

    def truncate(self, layer: int, length: int) -> None:
        self._rows[layer].truncate(length)
        self._staging.truncate(layer, length)

    def select(self, index: Tensor, lanes: Callable[[int], Tensor]) -> None:
        for layer, rows in self._rows.items():
            rows.select(lanes(layer))
        self._staging.forget()

    def stores(self) -> Iterator[tuple[str, Rows]]:
        for layer, both in self._rows.items():
            yield f"keys.{layer}", both.keys
            yield f"values.{layer}", both.values

    def allocated(self) -> dict[str, int]:
        return {"host": sum(both.nbytes for both in self._rows.values()), "device": self._staging.nbytes}


class _Buffer:
    """Copies of some entries of one layer on the device."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.layer, self.start, self.count = -1, 0, 0
        self.copied, self.read = torch.cuda.Event(), torch.cuda.Event()  # ends of the last copy, and of the last use

    def rows(self, count: int, like: PinnedRows) -> Tensor:
        """Return the first ``count`` rows as those of ``like``, (count, lanes, width)."""
        return self.data[: count * like.lanes * like.width].view(count, like.lanes, like.width)


class Staging:
    """Copies between the host's rows of all layers and buffers on the device, on a stream of their own. The host
    waits for none of them.

    Two buffers take turns: while attention reads one, the next entries are copied into the other, those of the layer
    that was read next in the last pass included. The third has entries on their way to the host. elements: those of a
    buffer, for each lane of a layer.
    """

    def __init__(self, device: torch.device, rows: Mapping[int, PinnedRows], elements: Mapping[int, int]) -> None:
        self.device, self._rows, self._elements = device, rows, elements
        self._stream = torch.cuda.Stream(device)
        self._data: Tensor | None = None
        self._buffers: list[_Buffer] = []
        self._turn = 0  # of the buffer that attention reads
        self._after: dict[int, int] = {}  # the layer that was read after each layer
        self._last: int | None = None  # the layer that was read last
        self._copying = False  # whether copies may not have ended

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return 0 if self._data is None else self._data.nbytes

    def wait(self) -> None:
        """Wait until all copies have ended."""
        if self._copying:
            self._stream.synchronize()
            self._copying = False

    def forget(self) -> None:
        """Free the buffers. The rows were replaced."""
        self._data, self._buffers = None, []

    def truncate(self, layer: int, length: int) -> None:
        """Forget the copies of a layer's entries from ``length`` on."""
        for buffer in self._buffers:
            if buffer.layer == layer:
                buffer.count = min(buffer.count, max(0, length - buffer.start))

    def _allocate(self, layer: int, lanes: int, dtype: torch.dtype) -> None:
        if self._data is None:
            with torch.inference_mode(False):  # tensors created in it are read-only outside
                self._data = torch.empty(BUFFERS, lanes * self._elements[layer], dtype=dtype, device=self.device)
            self._data.record_stream(self._stream)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still use this memory
            self._buffers = [_Buffer(part) for part in self._data]

    def _capacity(self, rows: PinnedRows) -> int:
        """Return how many rows a buffer has: whole blocks, if it has one."""
        assert self._data is not None
        count = max(self._data.shape[1] // (rows.lanes * rows.width), 1)
        return count // BLOCK * BLOCK or count

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append entries (lanes, n, dim) to a layer's rows."""
        rows, lanes, count = self._rows[layer], len(keys), keys.shape[1]
        rows.reserve(rows.length + count, lanes, keys.dtype)
        self._allocate(layer, lanes, keys.dtype)
        compute, buffer, capacity = torch.cuda.current_stream(self.device), self._buffers[2], self._capacity(rows)
        done = 0
        for _, place in rows.places(rows.length, rows.length + count):
            for part in place.split(capacity):
                compute.wait_event(buffer.copied)
                packed, stop = buffer.rows(len(part), rows), done + len(part)
                packed[..., : rows.keys.width].copy_(keys[:, done:stop].transpose(0, 1))
                packed[..., rows.keys.width :].copy_(values[:, done:stop].transpose(0, 1))
                buffer.read.record(compute)
                self._copy(buffer, [(part, packed)])
                done = stop
        rows.extend(count)

    def read(self, layer: int, stop: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield copies of the first ``stop`` entries of a layer in order: the first entry, and keys and values (lanes,
        n, dim). They are valid until the next is yielded."""
        rows = self._rows[layer]
        self._allocate(layer, rows.lanes, rows.pages[0].dtype)
        if self._last is not None:
            self._after[self._last] = layer
        self._last = layer
        capacity, compute = self._capacity(rows), torch.cuda.current_stream(self.device)
        for start in range(0, stop, capacity):
            end = min(start + capacity, stop)
            buffer = self._fetched(layer, start, end)
            self._turn = self._buffers.index(buffer)
            if end < stop:
                self._fetched(layer, end, min(end + capacity, stop))
            elif (after := self._after.get(layer)) is not None and (length := self._rows[after].length):
                self._fetched(after, 0, min(self._capacity(self._rows[after]), length))
            compute.wait_event(buffer.copied)
            copied = buffer.rows(end - start, rows).transpose(0, 1)
            try:
                yield start, *copied.split([rows.keys.width, rows.values.width], 2)
            finally:
                buffer.read.record(compute)

    def _fetched(self, layer: int, start: int, stop: int) -> _Buffer:
        """Return a buffer with the entries ``start`` to ``stop`` of a layer, which may still be copied."""
        known = (one for one in self._buffers[:2] if (one.layer, one.start) == (layer, start))
        buffer = next(known, self._buffers[1 - self._turn])
        if (buffer.layer, buffer.start) != (layer, start):
            buffer.layer, buffer.start, buffer.count = layer, start, 0
        if buffer.count < stop - start:
            rows, have = self._rows[layer], start + buffer.count
            target = buffer.rows(stop - start, rows)
            self._copy(buffer, [(target[at - start :][: len(one)], one) for at, one in rows.places(have, stop)])
            buffer.count = stop - start
        return buffer

    def _copy(self, buffer: _Buffer, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy the second tensor of each pair to the first, once the buffer's last use has ended."""
        self._stream.wait_event(buffer.read)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        buffer.copied.record(self._stream)
        self._copying = True


# -- sizes --------------------------------------------------------------------------------------------------


def stages(spec: CheckpointSpec, endless: bool) -> bool:
    """Return whether a checkpoint of a model on a GPU is staged. ``endless`` recalls passages of it, and a limited
    capacity loses entries: these checkpoints are copied page by page."""
    return spec.kind == "kv" and spec.where == "host" and spec.capacity is None and not endless


def staged_entries(entries: int, geometry: ModelGeometry, page: int) -> int:
    """Return how many ``entries`` of each layer's budget the buffers on the device take: an eighth, or more if buffers
    of ``page`` entries of one layer need more, but at most half."""
    smallest, largest = (-(-BUFFERS * rows // max(len(geometry.full_layers), 1)) for rows in (page, LONGEST))
    return min(max(entries // SHARE, smallest), largest, entries // 2)


def evicted_together(capacity: int) -> int:
    """Return how many of at most ``capacity`` resident entries leave the device together."""
    largest = min(BLOCK, capacity // SHARE)
    return 1 << (largest.bit_length() - 1) if largest else 1


def buffer_elements(geometry: ModelGeometry, staged: int, page: int) -> dict[int, int]:
    """Return the elements of a buffer for each lane of a layer, by layer, if the buffers take ``staged`` entries of
    each layer's budget. If they take none, each has ``page`` entries of the widest layer."""
    layers = geometry.full_layers
    total = staged * sum(layer.entry_elements for layer in layers) // BUFFERS
    total = total or page * max(layer.entry_elements for layer in layers)
    return {
        layer.index: max(total // layer.kv_heads // ALIGNED * ALIGNED, layer.key_dim + layer.value_dim)
        for layer in layers
    }
