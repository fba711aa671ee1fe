"""Rows whose first blocks several owners hold once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvkeep.memory.meter import storage_bytes
from kvkeep.memory.rows import BLOCK, Buffer, concatenated


class SharedRows:
    """Rows (..., **rows**, dim) that begin with whole blocks which nobody changes, so that others may hold them too;
    behind them a :class:`~kvkeep.memory.rows.Buffer` of its own. As long as nothing is shared it is that buffer.

    head: the blocks that do not change, in order, a tensor each. tail: the rows behind them.
    """

    first = 0

    def __init__(self, block: int = BLOCK, limit: int | None = None) -> None:
        self.block = block
        self.length = 0
        self.head: list[Tensor] = []
        self.tail = Buffer(block, limit)

    def share(self, other: SharedRows, length: int) -> None:
        """Hold the first ``length`` rows of ``other`` in this one, which is empty: whole blocks once for both, the rest
        copied."""
        other.freeze(length)
        self.head = other.head[: length // self.block]
        self.length = self.settled
        for _, rows in other.read(self.settled, length):
            self.append(rows)

    def freeze(self, length: int) -> None:
        """Let the whole blocks of the first ``length`` rows be ones that do not change."""
        count = length // self.block - len(self.head)
        if count <= 0:
            return
        rest = self.tail.view(count * self.block)
        with torch.inference_mode(False):
            self.head += [part.clone() for part in self.tail.view(0, count * self.block).split(self.block, -2)]
        self.tail = Buffer(self.block)
        if rest.shape[-2]:
            self.tail.append(rest)

    @property
    def settled(self) -> int:
        """How many rows do not change."""
        return len(self.head) * self.block

    @property
    def batch(self) -> int:
        """Rows of the batch, 0 before the first append."""
        return next((len(part) for part in (*self.head, self.tail.data) if part is not None), 0)

    def append(self, rows: Tensor) -> None:
        self.tail.append(rows)
        self.length += rows.shape[-2]

    def advance(self) -> None:
        self.tail.advance()
        self.length += 1

    def view(self) -> Tensor:
        """Return all rows as one tensor, which is a copy where there are blocks that do not change."""
        return concatenated(self, 0, self.length) if self.head else self.tail.view()

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        first = 0
        for part in self.head:
            low, high = max(start, first), min(stop, first + part.shape[-2])
            if low < high:
                yield low, part[..., low - first : high - first, :]
            first += part.shape[-2]
        yield from ((first + slot, rows) for slot, rows in self.tail.read(max(0, start - first), stop - first))

    def pick(self, lane: Tensor, slot: Tensor) -> Tensor:
        data = self.view()
        return data.flatten(0, -3)[lane.to(data.device), slot.to(data.device)]

    def truncate(self, length: int) -> None:
        """Forget the rows from slot ``length`` on; what is left of a block is copied."""
        if length < self.settled:
            blocks, rest = divmod(length, self.block)
            cut, self.head, self.tail = self.head[blocks], self.head[:blocks], Buffer(self.block)
            if rest:
                self.tail.append(cut[..., :rest, :])
        self.tail.truncate(length - self.settled)
        self.length = min(self.length, length)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``; nothing is shared then."""
        if self.head:
            data, self.head, self.tail = self.view(), [], Buffer(self.block)
            self.tail.append(data.index_select(0, index.to(data.device)))
        else:
            self.tail.select(index)

    @property
    def nbytes(self) -> int:
        return storage_bytes(*self.head) + self.tail.nbytes
