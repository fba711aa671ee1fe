"""Rows whose first blocks several owners share in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvkeep.memory.meter import storage_bytes
from kvkeep.memory.rows import BLOCK, Buffer, concatenated


class SharedRows:
    """Rows (..., **rows**, dim) in two parts: whole blocks that never change, so that several owners can share them,
    and a :class:`~kvkeep.memory.rows.Buffer`. Without shared blocks it is only that buffer."""

    first = 0

    def __init__(self, block: int = BLOCK, limit: int | None = None) -> None:
        self.block = block
        self.length = 0
        self.head: list[Tensor] = []
        """The unchanging blocks in order, one tensor each."""
        self.tail = Buffer(block, limit)
        """The rows after the blocks."""

    def freeze(self, length: int) -> list[Tensor]:
        """Return the whole blocks of the first ``length`` rows. From now on they never change."""
        count = length // self.block - len(self.head)
        if count > 0:
            rest = self.tail.view(count * self.block)
            with torch.inference_mode(False):
                self.head += [part.clone() for part in self.tail.view(0, count * self.block).split(self.block, -2)]
            self.tail = Buffer(self.block)
            if rest.shape[-2]:
                self.tail.append(rest)
        return self.head[: length // self.block]

    @property
    def settled(self) -> int:
        """The number of rows that never change."""
        return len(self.head) * self.block

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first append."""
        return next((len(part) for part in (*self.head, self.tail.data) if part is not None), 0)

    def append(self, rows: Tensor) -> None:
        self.tail.append(rows)
        self.length += rows.shape[-2]

    def adopt(self, rows: Tensor) -> None:
        """Use ``rows`` itself as an unchanging block if it has the size of a block; otherwise append it."""
        if self.tail.length or self.tail.limit is not None or rows.shape[-2] != self.block:
            return self.append(rows)
        self.head.append(rows)
        self.length += self.block
        return None

    def advance(self) -> None:
        self.tail.advance()
        self.length += 1

    def view(self) -> Tensor:
        """Return all rows as one tensor. It is a copy if there are unchanging blocks."""
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
        """Remove the rows from slot ``length`` on; the rest of a truncated block is copied."""
        if length < self.settled:
            blocks, rest = divmod(length, self.block)
            cut, self.head, self.tail = self.head[blocks], self.head[:blocks], Buffer(self.block)
            if rest:
                self.tail.append(cut[..., :rest, :])
        self.tail.truncate(length - self.settled)
        self.length = min(self.length, length)

    def select(self, index: Tensor) -> None:
        """Replace the batch by the rows of ``index``; then nothing is shared."""
        if self.head:
            data, self.head, self.tail = self.view(), [], Buffer(self.block)
            self.tail.append(data.index_select(0, index.to(data.device)))
        else:
            self.tail.select(index)

    @property
    def nbytes(self) -> int:
        return storage_bytes(*self.head) + self.tail.nbytes
