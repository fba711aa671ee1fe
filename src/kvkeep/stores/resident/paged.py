"""Paged entries: fixed blocks in a pool, a table of blocks for each row, prefixes shared until they are written.

The block table of vLLM's PagedAttention (arXiv:2309.06180): sequences grow without moving. Rows of a batch (beams,
repeats) or whole caches (:meth:`KeepCache.fork <kvkeep.cache.KeepCache.fork>`) with the same beginning share its
blocks. A shared block is copied before it is written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kvkeep.contracts.entries import EvictedEntries, Piece
from kvkeep.contracts.resident import Resident
from kvkeep.contracts.site import Site
from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.memory.meter import storage_bytes

BLOCK_SIZE = 32
"""Entries of a block. A row wastes half a block on average; at most one block of a shared prefix is copied."""

Span = tuple[int, int, int]  # first slot, slots, first place in the pool (the same for every row)


class BlockPool:
    """Reference counts of blocks, and a free list. The tensors are in each layer, with one place for each entry."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.free: list[int] = []

    def take(self) -> int:
        """Return the lowest free block, so that runs stay long, with a count of one."""
        if not self.free:
            grown = max(8, len(self.counts) // 2)  # the same growth as in :func:`pool_rows`
            self.free = list(range(len(self.counts) + grown - 1, len(self.counts) - 1, -1))
            self.counts += [0] * grown
        block = self.free.pop()
        self.counts[block] = 1
        return block

    def hold(self, blocks: list[int]) -> None:
        """Count one more holder of each block."""
        for block in blocks:
            self.counts[block] += 1

    def drop(self, blocks: list[int]) -> None:
        """Count one holder less of each block. Blocks without holders become free."""
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free.append(block)
        self.free.sort(reverse=True)

    @property
    def places(self) -> int:
        return len(self.counts) * BLOCK_SIZE


class BlockTable:
    """The blocks of each row of a batch, for all layers of one cache. All rows have the same number of slots."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.rows: list[list[int]] = []
        self.length = 0
        self._copies: list[tuple[int, int]] = []
        self._spans: list[Span | tuple[int, int, Tensor]] | None = None
        self._finalizer = weakref.finalize(self, _drop_all, pool, self.rows)

    def share(self, other: BlockTable) -> None:
        """Take the blocks of ``other`` into this empty table, and count one more holder of each."""
        self.pool, self.length = other.pool, other.length
        self.rows.extend(list(row) for row in other.rows)
        for row in self.rows:
            self.pool.hold(row)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _drop_all, self.pool, self.rows)

    def reserve(self, batch: int, stop: int) -> list[tuple[int, int]]:
        """Make room for slots up to ``stop``. Every layer calls it; the first call does the work.

        Returns the (from, to) blocks that each layer must copy before it writes, because they are shared.
        """
        if self.length == stop and self.rows:
            return self._copies
        if not self.rows:
            self.rows.extend([] for _ in range(batch))
        self._copies, self._spans = [], None
        partial = self.length // BLOCK_SIZE
        for row in self.rows:
            if self.length % BLOCK_SIZE and self.pool.counts[row[partial]] > 1:
                fresh = self.pool.take()
                self._copies.append((row[partial], fresh))
                self.pool.drop([row[partial]])
                row[partial] = fresh
            while len(row) * BLOCK_SIZE < stop:
                row.append(self.pool.take())
        self.length = stop
        return self._copies

    @property
    def nbytes(self) -> int:
        """Bytes of the places of blocks that rows do not share."""
        spans = self._spans or ()
        return storage_bytes(*(where for _, _, where in spans if not isinstance(where, int)))

    def truncate(self, length: int) -> None:
        """Give back the blocks beyond slot ``length``."""
        if length >= self.length:
            return
        keep = -(-length // BLOCK_SIZE)
        for row in self.rows:
            self.pool.drop(row[keep:])
            del row[keep:]
        self.length, self._spans, self._copies = length, None, []

    def select(self, index: list[int]) -> None:
        """Replace the rows by those of ``index``: only tables change, entries stay in place."""
        chosen = [list(self.rows[number]) for number in index]
        for row in chosen:
            self.pool.hold(row)
        for row in self.rows:
            self.pool.drop(row)
        self.rows[:] = chosen
        self._spans, self._copies = None, []

    def places(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return where in the pool slots ``start``..``stop`` of every row are, (rows, slots) long."""
        blocks = torch.tensor([row[start // BLOCK_SIZE : -(-stop // BLOCK_SIZE)] for row in self.rows], device=device)
        inside = torch.arange(BLOCK_SIZE, device=device)
        places = (blocks.unsqueeze(-1) * BLOCK_SIZE + inside).flatten(1)
        return places[:, start % BLOCK_SIZE :][:, : stop - start]

    def spans(self, page: int, device: torch.device) -> list[Span | tuple[int, int, Tensor]]:
        """Return the slots as spans: (slot, count, place) where every row has the same consecutive blocks, else
        (slot, count, places of every row), ``page`` slots at most."""
        if self._spans is None:
            self._spans = list(self._find_spans(page, device))
        return self._spans

    def _find_spans(self, page: int, device: torch.device) -> Iterator[Span | tuple[int, int, Tensor]]:
        columns = list(zip(*self.rows, strict=True))
        common = [len(set(column)) == 1 for column in columns]
        cuts = [0]
        for at, (before, after) in enumerate(pairwise(columns), start=1):
            follows = common[at - 1] and common[at] and after[0] == before[0] + 1
            apart = not common[at - 1] and not common[at] and (at - cuts[-1]) * BLOCK_SIZE < page
            if not (follows or apart):
                cuts.append(at)
        for first, last in pairwise([*cuts, len(columns)] if columns else []):
            slot = first * BLOCK_SIZE
            count = min(last * BLOCK_SIZE, self.length) - slot
            if common[first]:
                yield slot, count, columns[first][0] * BLOCK_SIZE
            else:
                yield slot, count, self.places(slot, slot + count, device)


def _drop_all(pool: BlockPool, rows: list[list[int]]) -> None:
    for row in rows:
        pool.drop(row)


class Paged(Resident):
    """One layer's entries in the places of a block table; all stay. Attention reads runs of blocks that all rows share
    as views, and gathers the others ``page`` slots at a time."""

    def __init__(self, site: Site, table: BlockTable) -> None:
        self.table, self.meter, self.page = table, site.meter, site.page
        self.heads, self.leads = site.layer.kv_heads, site.first
        self.length = 0
        self._pools: list[Tensor] = []  # keys and values, (kv_heads, places, dim); shared by forks

    def share(self, other: Paged) -> None:
        """Share the tensors of ``other``, whose blocks this layer's table shares."""
        self._pools, self.length = other._pools, other.length

    def arrive(self, keys: Tensor, values: Tensor) -> None:
        """Make room for new entries (lanes, n, dim): the first layer of a step changes the table for all, so blocks
        that were shared must be copied before this layer's past is read."""
        copies = self.table.reserve(len(keys) // self.heads, self.length + keys.shape[1])
        size = self.table.pool.places
        if not self._pools:
            self._pools += [rows.new_empty(self.heads, size, rows.shape[2]) for rows in (keys, values)]
        for number, pool in enumerate(self._pools):
            if pool.shape[1] < size:  # forks share the list, so they see the new pool
                grown = pool.new_empty(pool.shape[0], size, pool.shape[2])
                grown[:, : pool.shape[1]] = pool
                self._pools[number] = grown
        for source, target in copies:
            for pool in self._pools:
                fresh = slice(target * BLOCK_SIZE, (target + 1) * BLOCK_SIZE)
                pool[:, fresh] = pool[:, source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]

    def admit(self, keys: Tensor, values: Tensor, first: int) -> EvictedEntries | None:
        stop = first + keys.shape[1]
        places = self.table.places(first, stop, keys.device).flatten()
        for pool, rows in zip(self._pools, (keys, values), strict=True):
            pool.index_copy_(1, places, rows.unflatten(0, (-1, self.heads)).transpose(0, 1).flatten(1, 2))
        self.length = stop
        return None

    def pieces(self, ordered: bool = True) -> Iterator[Piece]:
        if not self.length:
            return
        rows, device = len(self.table.rows), self._pools[0].device
        for slot, count, where in self.table.spans(self.page, device):
            filled = min(count, self.length - slot)
            if filled <= 0:
                return
            if isinstance(where, int):
                keys, values = (pool[:, None, where : where + filled] for pool in self._pools)
                yield Piece(keys, values, first=slot, shared=rows > 1)
                continue
            index = where[:, :filled].flatten()
            # Gathered entries are ordered by head, then by row.
            lanes = torch.arange(rows * self.heads, device=device).view(rows, self.heads).T.flatten()
            keys, values = (
                pool.index_select(1, index).unflatten(1, (rows, filled)).flatten(0, 1)[:, None] for pool in self._pools
            )
            with self.meter.holding(keys, values):
                yield Piece(keys, values, first=slot, lanes=lanes, formed=True)

    def resident_slots(self, unmerged: bool = False) -> Tensor:
        return torch.ones(len(self.table.rows) * self.heads, self.length, dtype=torch.bool)

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        self.table.truncate(length)

    def select(self, lanes: Tensor) -> None:
        """Replace the lanes by those of an index. All layers share the table; the first one changes it."""
        if self.leads and self.table.rows:
            self.table.select((lanes[:: self.heads] // self.heads).tolist())

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, which forks share: each of them counts all of it."""
        return sum(pool.nbytes for pool in self._pools)

    def state(self) -> dict[str, Tensor]:
        if not self.length:
            return {}
        places = self.table.places(0, self.length, self._pools[0].device)  # (rows, slots)
        return {
            name: pool[:, places].transpose(0, 1).flatten(0, 1)
            for name, pool in zip(("keys", "values"), self._pools, strict=True)
        }

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        if state:
            self.arrive(state["keys"], state["values"])
            self.admit(state["keys"], state["values"], 0)

    def check(self, extent: Extent) -> None:
        if self.length != extent.slots or len(self.table.rows) * self.heads != extent.lanes:
            raise ShapeError(f"resident entries are not of {extent.slots} slots")
        if self._pools:
            keys, values = self._pools
            extent.entries(keys, values, self.heads)


def pool_rows(tokens: int) -> int:
    """Return the entries of a pool that has grown by halves until it has ``tokens`` of one row."""
    blocks = 0
    while blocks * BLOCK_SIZE < tokens:
        blocks += max(8, blocks // 2)
    return blocks * BLOCK_SIZE
