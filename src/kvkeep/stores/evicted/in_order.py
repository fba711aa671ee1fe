"""The first entries of a text, in the cache's checkpoint (KV-Direct)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError, within
from kvkeep.memory.rows import Rows
from kvkeep.step.plan import Destination, StoreShare


class InOrder(EvictedStore):
    """The first entries of the text, in the cache's checkpoint. They are evicted in order, in all lanes at the same
    time."""

    def __init__(self, site: Site) -> None:
        assert site.checkpoint is not None
        self.checkpoint, self.layer = site.checkpoint, site.layer.index
        self.taken = 0  # number of entries

    def states(self, lanes: int, length: int) -> Tensor:
        codes = torch.full((lanes, length), EntryState.CHECKPOINTED, dtype=torch.int8)
        codes[:, self.checkpoint.beginning(self.layer) : self.checkpoint.first(self.layer)] = EntryState.DROPPED
        return codes

    @property
    def rows(self) -> tuple[Rows, Rows] | None:
        """Where keys and values are kept; None where the checkpoint has them in another form."""
        return self.checkpoint.rows(self.layer)

    def adopt(self, keys: Sequence[Tensor], values: Sequence[Tensor], least: int) -> int:
        """Take the first entries of a text into this empty store: at least ``least`` ones of the pieces (lanes, n, dim)
        in order, which never change, and more where that needs no copy. Return how many."""
        for key, value in zip(keys, values, strict=True):
            copied = min(key.shape[1], max(0, least - self.taken))
            count = key.shape[1] if self.checkpoint.holds(self.layer, key) else copied
            if count:
                self.checkpoint.adopt(self.layer, key[:, :count], value[:, :count])
                self.taken += count
            if count < key.shape[1]:
                break
        return self.taken

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        self.checkpoint.truncate(self.layer, self.taken)  # a failed write may have left rows
        self.checkpoint.append(self.layer, left.keys, left.values)
        self.taken += left.slots.shape[1]

    def plan(self, append: Destination, first_lane: int, evicts: bool) -> StoreShare | None:
        self.checkpoint.truncate(self.layer, self.taken)
        evict = self.checkpoint.next_row(self.layer) if evicts else None
        if evicts and evict is None:
            return None
        stop = self.taken + evicts
        spans = self.checkpoint.spans(self.layer, stop) if stop else ()
        return None if spans is None else StoreShare(spans, evict)

    def commit(self) -> None:
        self.checkpoint.commit(self.layer)
        self.taken += 1

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        if self.taken:
            yield from self.checkpoint.pieces(self.layer, self.taken, lazy=True)

    def pages(self) -> Iterator[Piece]:
        """Yield all entries as tensors, a page at a time."""
        if self.taken:
            yield from self.checkpoint.pieces(self.layer, self.taken)

    def truncate(self, length: int, resident: WorkingSet) -> None:
        self.taken = min(self.taken, length)
        self.checkpoint.truncate(self.layer, self.taken)

    def state(self) -> dict[str, Tensor]:
        return {"count": torch.tensor([self.taken])}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.taken = int(state["count"][0])

    def check(self, extent: Extent) -> None:
        within("entries that left", self.taken, 0, extent.slots + 1)
        if not self.checkpoint.by_token and self.checkpoint.length(self.layer) != self.taken:
            raise ShapeError("entries that left are missing in the checkpoint")
