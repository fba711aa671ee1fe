"""``paged``: all entries in fixed blocks of a pool, with a table of blocks for each row of a batch.

The block table of vLLM's PagedAttention (arXiv:2309.06180, section 4): sequences grow without moving. Rows of a batch
(beams, repeats) or whole caches (:func:`fork`) with the same beginning share its blocks. A shared block is copied
before it is written.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kvkeep.memory.rows import BLOCK, Rows
from kvkeep.policies.selectors.nobody import Nobody
from kvkeep.step.plan import LayerStep
from kvkeep.stores.dynamic import DynamicLayer

BLOCK_SIZE = 32
"""Entries of a block. A row wastes half a block on average; at most one block of a shared beginning is copied."""


@dataclass(frozen=True)
class InBlocks(Nobody):
    """All entries stay, in blocks of 32 that rows with the same beginning share."""

    def layer(self, entries: int | None, pieces: bool) -> DynamicLayer:
        return PagedLayer()


def fork(cache: Any) -> Any:
    """Return a second :class:`~kvkeep.cache.KeepCache` of method ``paged`` that has read the same text. Both share all
    blocks until one of them writes to them."""
    twin = cache.fork()
    for mine, other in zip(cache.layers, twin.layers, strict=True):
        if isinstance(mine, PagedLayer):
            other.share(mine)
    return twin


class PagedLayer(DynamicLayer):
    """A layer whose keys and values are :class:`BlockRows`. Attention reads consecutive blocks as a view, and gathers
    the others in each step."""

    lends = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [BlockRows() for _ in range(2)]
        self._keys, self._values = self.blocks  # type: ignore[assignment]

    def share(self, other: PagedLayer) -> None:
        """Hold the blocks of ``other`` in place of those of this layer."""
        for mine, source in zip(self.blocks, other.blocks, strict=True):
            mine.share(source)

    def pieces(self) -> list[tuple[Tensor, Tensor]]:
        return [(self._keys.view(), self._values.view())]

    def plan(self, count: int = 1) -> LayerStep | None:
        """Return None: a step may need a new block, or a copy of a shared one."""
        return None


class BlockPool:
    """Blocks of rows, (heads, places, dim), and how many rows of a batch hold each of them."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.data: Tensor | None = None

    def block(self, number: int) -> Tensor:
        """Return the places of a block, (heads, BLOCK_SIZE, dim)."""
        assert self.data is not None
        return self.data[:, number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]

    def take(self, rows: Tensor) -> int:
        """Return the lowest free block, so that consecutive ones stay views, with a count of one. rows: rows (batch,
        heads, n, dim) of the form that the pool has."""
        number = next(number for number in count() if not self.counts[number])
        self.counts[number] = 1
        needed, places = (number + 1) * BLOCK_SIZE, 0 if self.data is None else self.data.shape[1]
        if needed > places:
            with torch.inference_mode(False):  # tensors created in it are read-only outside
                grown = rows.new_empty(rows.shape[1], -(-needed // BLOCK) * BLOCK, rows.shape[3])
            if self.data is not None:
                grown[:, :places] = self.data
            self.data = grown
        return number

    def drop(self, blocks: list[int]) -> None:
        """Count one holder less of each block. Blocks without holders are free."""
        self.counts.subtract(blocks)


class BlockRows(Rows):
    """Rows (batch, heads, **rows**, dim) in blocks of a pool: the same number in every row of the batch."""

    def __init__(self) -> None:
        self.pool = BlockPool()
        self.table: list[list[int]] = []
        """The blocks of each row of the batch, in order."""
        self.head: list[Tensor] = []
        """No pieces: layers of other methods share none."""
        self._finalizer = weakref.finalize(self, _drop_all, self.pool, self.table)

    def share(self, other: BlockRows) -> None:
        """Hold the blocks of ``other`` in place of those of this store."""
        self._finalizer()
        self.pool, self.length, self.table = other.pool, other.length, [list(row) for row in other.table]
        for row in self.table:
            self.pool.counts.update(row)
        self._finalizer = weakref.finalize(self, _drop_all, self.pool, self.table)

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first append."""
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, which forks share: each of them counts all of it."""
        return 0 if self.pool.data is None else self.pool.data.nbytes

    def append(self, rows: Tensor) -> None:
        start, stop = self.length, self.length + rows.shape[-2]
        if not self.table:
            self.table.extend([] for _ in range(len(rows)))
        for row in self.table:
            last = start // BLOCK_SIZE
            if start % BLOCK_SIZE and self.pool.counts[row[last]] > 1:
                shared, row[last] = row[last], self.pool.take(rows)
                self.pool.block(row[last]).copy_(self.pool.block(shared))
                self.pool.drop([shared])
            while len(row) * BLOCK_SIZE < stop:
                row.append(self.pool.take(rows))
        assert self.pool.data is not None
        places = self._places(start, stop).flatten()
        self.pool.data.index_copy_(1, places, rows.transpose(0, 1).flatten(1, 2))
        self.length = stop

    def _places(self, start: int, stop: int) -> Tensor:
        """Return where in the pool the rows ``start``..``stop`` are, (batch, rows) int64."""
        assert self.pool.data is not None
        first, device = start // BLOCK_SIZE, self.pool.data.device
        blocks = torch.tensor([row[first : -(-stop // BLOCK_SIZE)] for row in self.table], device=device)
        places = (blocks[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten(1)
        return places[:, start - first * BLOCK_SIZE :][:, : stop - start]

    def view(self) -> Tensor:
        """Return all rows: a view where every row of the batch has the same consecutive blocks, else a copy."""
        assert self.pool.data is not None
        blocks = self.table[0]
        start = blocks[0] if blocks else 0
        if all(row == [*range(start, start + len(blocks))] for row in self.table):
            start *= BLOCK_SIZE
            return self.pool.data[:, start : start + self.length].expand(len(self.table), -1, -1, -1)
        return self.pool.data[:, self._places(0, self.length)].transpose(0, 1)

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        if start < stop:
            yield start, self.view()[..., start:stop, :]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        for row in self.table:
            self.pool.drop(row[-(-self.length // BLOCK_SIZE) :])
            del row[-(-self.length // BLOCK_SIZE) :]

    def select(self, index: Tensor) -> None:
        """Replace the batch by the rows of ``index``: only the table changes, entries stay in place."""
        chosen = [list(self.table[number]) for number in index.tolist()]
        for row in chosen:
            self.pool.counts.update(row)
        _drop_all(self.pool, self.table)
        self.table[:] = chosen

    def shareable(self, length: int) -> int:
        return 0


def _drop_all(pool: BlockPool, table: list[list[int]]) -> None:
    for row in table:
        pool.drop(row)
