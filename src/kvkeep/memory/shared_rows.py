"""Rows that lie in pieces, whose first blocks several owners share in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from kvkeep.memory.meter import storage_bytes
from kvkeep.memory.rows import BLOCK, Buffer, Rows, concatenated, selected

PIECE_BLOCKS = 2
"""Blocks of a piece. Attention reads shorter pieces more slowly."""


class SharedRows(Rows):
    """Rows (..., **rows**, dim) in full pieces (``head``) and a :class:`~kvkeep.memory.rows.Buffer` (``tail``), which
    becomes the next piece when it has ``PIECE_BLOCKS`` blocks. So no row is copied for long when rows arrive, and
    several owners can hold the same pieces: a full piece never changes. Without ``pieces`` there is only the buffer,
    which grows, so that all rows are one tensor."""

    def __init__(self, block: int = BLOCK, pieces: bool = False) -> None:
        self.block = block
        self.in_pieces = pieces
        self.piece = PIECE_BLOCKS * block if pieces else sys.maxsize
        """The number of rows of a full piece."""
        self.head: list[Tensor] = []
        """The full pieces in order, each a tensor of whole blocks with storage of its own."""
        self.tail = Buffer(block)
        """The rows after the pieces."""
        self._lent = 0  # the first pieces, which other owners may hold

    def shareable(self, length: int) -> int:
        """Return how many of the first ``length`` rows other owners can hold, too: whole blocks in pieces, but no part
        of a piece that others already hold."""
        if not self.in_pieces:
            return 0
        stop, start = min(length, self.length) // self.block * self.block, 0
        for part in self.head[: self._lent]:
            if stop < start + part.shape[-2]:
                return start
            start += part.shape[-2]
        return stop

    def freeze(self, length: int) -> list[Tensor]:
        """Return the :meth:`shareable` ones of the first ``length`` rows in pieces. From now on they never change. A
        piece that ends behind them is divided, which copies it."""
        self._close()
        stop, count, start = self.shareable(length), 0, 0
        while start < stop:
            if count == len(self.head):
                self.head += _copies(self.tail.view(), [stop - start])
                self.tail, rest = Buffer(self.block), self.tail.view(stop - start)
                self.tail.append(rest)
            elif (rows := self.head[count].shape[-2]) > stop - start:
                self.head[count : count + 1] = _copies(self.head[count], [stop - start, start + rows - stop])
            start += self.head[count].shape[-2]
            count += 1
        self._lent = max(self._lent, count)
        return self.head[:count]

    @property
    def settled(self) -> int:
        """The number of rows of the full pieces."""
        return sum(part.shape[-2] for part in self.head)

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first append."""
        return next((len(part) for part in (*self.head, self.tail.data) if part is not None), 0)

    def append(self, rows: Tensor) -> None:
        count, start = rows.shape[-2], 0
        while start < count:
            self._close()
            part = rows[..., start : start + self.piece - self.tail.length, :]
            self.tail.append(part)
            start += part.shape[-2]
        self.length += count

    def _close(self) -> None:
        """Make the buffer a piece if it is full."""
        if self.tail.length == self.piece and self.tail.data is not None:
            self.head.append(self.tail.data)
            self.tail = Buffer(self.block)

    def adopt(self, rows: Tensor) -> None:
        """Use ``rows`` itself as a piece if there are pieces, and it has the size of one or of a block; otherwise
        append it."""
        self._close()
        if not self.in_pieces or self.tail.length or rows.shape[-2] not in (self.block, self.piece):
            return self.append(rows)
        self.head.append(rows)
        self._lent = len(self.head)
        self.length += rows.shape[-2]
        return None

    def advance(self) -> None:
        self.tail.advance()
        self.length += 1

    def view(self) -> Tensor:
        """Return all rows as one tensor. It is a copy if there are full pieces."""
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
        """Remove the rows from slot ``length`` on; the rest of a truncated piece is copied."""
        while self.head and length < self.settled:
            cut = self.head.pop()
            self.tail = Buffer(self.block)
            if (rest := length - self.settled) > 0:
                self.tail.append(cut[..., :rest, :])
        self._lent = min(self._lent, len(self.head))
        self.tail.truncate(length - self.settled)
        self.length = min(self.length, length)

    def select(self, index: Tensor) -> None:
        """Replace the batch by the rows of ``index``; then nothing is shared."""
        self.head = [selected(part, index, None, number >= self._lent) for number, part in enumerate(self.head)]
        self.tail.select(index)
        self._lent = 0

    @property
    def nbytes(self) -> int:
        return storage_bytes(*self.head) + self.tail.nbytes


def _copies(rows: Tensor, counts: list[int]) -> list[Tensor]:
    """Return copies of the first ``counts`` rows, in pieces that later passes may write to."""
    with torch.inference_mode(False):
        return [part.clone() for part in rows[..., : sum(counts), :].split(counts, -2)]
