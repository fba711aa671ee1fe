"""A text in order (KV-Direct): the newest entries of every lane in a ring, earlier ones in the cache's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.contracts.entries import Beginning, EntryState, EvictedEntries, Piece
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError, within
from kvkeep.memory.places import Device
from kvkeep.memory.rows import JoinedRows, Ring, Rows, concatenated, up
from kvkeep.step.plan import Destination, LayerStep, Span, StoreShare


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
        """The rows of keys and values; None if the checkpoint stores them in another form."""
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

    def plan(self, append: Destination, first_lane: int, evicts: int) -> StoreShare | None:
        self.checkpoint.truncate(self.layer, self.taken)
        evict = self.checkpoint.next_row(self.layer) if evicts else None
        if evicts and (evict is None or evict.row + evicts > evict.keys.shape[-2]):  # the page has not as many rows
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


class Newest(Resident):
    """Slots :attr:`evicted` .. :attr:`length` of every lane, within a budget. The ``store`` takes the earlier slots, in
    order."""

    def __init__(self, site: Site, store: InOrder) -> None:
        home, capacity = Device(site.device), site.entries - store.checkpoint.staged
        self.store, self._block = store, store.checkpoint.block
        self._keys, self._values = Ring(capacity, home), Ring(capacity, home)

    @property
    def rows(self) -> tuple[Ring, Ring]:
        """Keys and values."""
        return self._keys, self._values

    @property
    def length(self) -> int:
        return self._keys.length

    @property
    def evicted(self) -> int:
        return self._keys.first

    def pieces(self, ordered: bool = True) -> Iterator[Piece]:
        """Yield the entries: as one piece if the order does not matter, else as at most two."""
        keys, values = self._keys.everything(), self._values.everything()
        if not ordered and keys is not None and values is not None:
            yield Piece(keys[:, None], values[:, None], first=self.evicted)
            return
        span = (self.evicted, self.length)
        for (first, key), (_, value) in zip(self._keys.read(*span), self._values.read(*span), strict=True):
            yield Piece(key[:, None], value[:, None], first=first)

    def plan(self, count: int = 1) -> LayerStep | None:
        keys, values, capacity = self._keys.data, self._values.data, self._keys.capacity
        if keys is None or values is None:
            return None
        if (row := self.length % capacity) + count > keys.shape[1]:  # they wrap, or the ring has no rows for them yet
            return None
        append = Destination(keys, values, row)  # in a full ring, the row of the oldest entry
        first = max(self.evicted, self.length + count - capacity)  # that stays
        evicts = first - self.evicted
        share = self.store.plan(append, 0, evicts)
        if share is None:
            return None
        start = first % capacity
        stop = start + self.length + count - first
        spans = [*share.attend, Span(keys, values, start, min(stop, capacity))]
        if stop > capacity:
            spans.append(Span(keys, values, 0, stop - capacity))
        return LayerStep(append, self.length, evict=share.evict, attend=spans, tokens=count, evicts=max(evicts, 1))

    def commit(self) -> None:  # in an order in which an interrupted call can be repeated
        full = self.length - self.evicted == self._keys.capacity
        if full and self.store.taken == self.evicted:
            self.store.commit()
        if self._values.length == self._keys.length:
            self._values.advance()
        self._keys.advance()

    def adopt(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
        length = sum(piece.shape[1] for piece in keys)
        evicted = self.store.adopt(keys, values, max(0, length - self._keys.capacity))
        for rows, pieces in ((self._keys, keys), (self._values, values)):
            rows.first = rows.length = evicted
            for piece in _after(pieces, evicted):
                rows.append(piece)
        return True

    @property
    def lends(self) -> bool:  # type: ignore[override]
        return self.store.rows is not None and all(rows.lends for rows in self.store.rows)

    def beginning(self, length: int) -> Beginning:
        self.store.truncate(self.evicted, self)  # type: ignore[arg-type]  # a failed write may have left rows
        assert self.store.rows is not None
        blocks = [rows.freeze(min(length, rows.length)) for rows in self.store.rows]
        joined = [JoinedRows(*pair) for pair in zip(self.store.rows, self.rows, strict=True)]
        return Beginning.of(blocks, joined, length)

    def admit(self, keys: Tensor, values: Tensor, first: int) -> EvictedEntries | None:
        """Keep new entries (lanes, n, dim). The store takes the oldest beyond the budget before they are replaced, in
        whole blocks."""
        stop = first + keys.shape[1]
        kept = max(self.evicted, up(stop - self._keys.capacity, self._block))
        span = (self.evicted, min(kept, first))
        for (slot, key), (_, value) in zip(self._keys.read(*span), self._values.read(*span), strict=True):
            self._give(slot, key, value)
        if (skipped := kept - first) > 0:  # a chunk longer than the budget
            self._give(first, keys[:, :skipped], values[:, :skipped])
        self._keys.append(keys)
        self._values.append(values)
        return None

    def _give(self, first: int, keys: Tensor, values: Tensor) -> None:
        slots = torch.arange(first, first + keys.shape[1], device=keys.device).expand(len(keys), -1)
        self.store.take(EvictedEntries(keys, values, slots, gaps=False), self)  # type: ignore[arg-type]
        # The store has the entries, even if the rest of this step fails.
        self._keys.first = self._values.first = first + keys.shape[1]

    def resident_slots(self, unmerged: bool = False) -> Tensor:
        return (torch.arange(self.length) >= self.evicted)[None]

    def truncate(self, length: int) -> None:
        self.store.truncate(length, self)  # type: ignore[arg-type]  # a failed write may have left rows
        for rows in (self._keys, self._values):
            rows.truncate(length)
            rows.first = max(rows.first, self.store.taken)  # an interrupted step has given its entry to the store

    def select(self, lanes: Tensor) -> None:
        self._keys.select(lanes)
        self._values.select(lanes)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def state(self) -> dict[str, Tensor]:
        if self.length == self.evicted:
            return {}
        span = (self.evicted, self.length)
        return {"keys": concatenated(self._keys, *span), "values": concatenated(self._values, *span)}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        count = state["keys"].shape[-2] if state else 0
        for rows, name in ((self._keys, "keys"), (self._values, "values")):
            rows.first = rows.length = length - count
            if count:
                rows.append(state[name])

    def check(self, extent: Extent) -> None:
        count = self._keys.length - self._keys.first
        within("resident entries", count, 0, min(extent.slots, self._keys.capacity) + 1)
        if count and extent.entries(self._keys.data, self._values.data) < count:
            raise ShapeError("resident entries are missing")
        if self.store.taken != self.evicted:
            raise ShapeError("entries are missing or there twice")


def _after(pieces: Sequence[Tensor], start: int) -> list[Tensor]:
    """Return the rows from ``start`` on of pieces (lanes, n, dim) that follow one another."""
    found, first = [], 0
    for piece in pieces:
        low = max(start - first, 0)
        if low < piece.shape[1]:
            found.append(piece[:, low:])
        first += piece.shape[1]
    return found
