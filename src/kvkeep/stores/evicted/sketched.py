"""Evicted entries in a count sketch: attention reads an estimate of each (KVReviver)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError, fits, fits_each
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.step.torch import MAX_CODED_QUERIES
from kvkeep.stores.evicted.sketch import PAGE, ROWS, CountSketch, Estimates, places
from kvkeep.stores.slots import compact

SWAPS = 8
"""Entries of a lane that are compared at a time."""


class Hashed:
    """The places of all slots in a sketch, for all layers of one cache. They are hashes of positions."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._known: dict[int, Tensor] = {}  # by slots per row: (rows, batch, slots of the sequence)

    def at(self, slots: Tensor, size: int) -> Tensor:
        """Return the places of the entries at ``slots`` (lanes, n) in rows of ``size`` slots, (rows, lanes, n) int32;
        any place for -1."""
        length = self.ledger.length
        known = self._known.get(size)
        if known is None or known.shape[2] != length:
            positions = self.ledger.positions.view().squeeze(-1)
            known = self._known[size] = places(positions, ROWS, size).int()
        heads = slots.shape[0] // self.ledger.batch
        row = torch.arange(slots.shape[0], device=slots.device)[:, None] // heads * length
        return known.flatten(1).index_select(1, (slots.clamp(min=0) + row).flatten()).view(ROWS, *slots.shape)

    def clear(self) -> None:
        self._known = {}

    @property
    def nbytes(self) -> int:
        return nbytes(*self._known.values())


class Sketched(EvictedStore):
    """Sketches of keys and values, and a flag for each lane and slot: whether the entry is in the sketches.

    slots: the slots in a row of the sketch. swap: an entry's estimate becomes resident when its rank exceeds this
    factor times that of the lowest resident entry (KVReviver, Algorithm 3); the sketch then subtracts the same
    estimate. 0: never. leads: this store counts the data that the sketches of all layers share.
    """

    def __init__(self, hashed: Hashed, slots: int, swap: float, meter: Meter, leads: bool) -> None:
        self.hashed, self.size, self.swap_at, self.meter, self.leads = hashed, slots, swap, meter, leads
        self.listens = swap > 0
        self.sketches: tuple[CountSketch, CountSketch] | None = None  # of keys and of values
        self.inside: Tensor | None = None  # (lanes, slots + 1) bool; the last column stands for -1
        self.scores: Tensor | None = None  # (lanes, slots + 1) float32, if scores are observed
        self._yielded: list[Tensor] = []  # slots of the last yielded pieces

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        if self.sketches is None:
            self.sketches = self.empty(left.keys, left.values)
        at, there = self.hashed.at(left.slots, self.size), left.slots >= 0
        for sketch, vectors in zip(self.sketches, left[:2], strict=True):
            sketch.insert(at, vectors, there)
        self.inside = _put(self.inside, left.slots, True)
        if self.listens:
            assert left.scores is not None
            self.scores = _put(self.scores, left.slots, left.scores)

    def sketch(self, like: Tensor, signed: bool) -> CountSketch:
        """Return an empty sketch of vectors ``like`` (lanes, n, dim)."""
        return CountSketch(len(like), ROWS, self.size, like.shape[-1], signed, like=like)

    def empty(self, keys: Tensor, values: Tensor) -> tuple[CountSketch, CountSketch]:
        """Return empty sketches. Keys have no signs, as in the paper."""
        return self.sketch(keys, False), self.sketch(values, True)

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        """Yield estimates of all entries in the sketches, without decoding them."""
        self._yielded = []
        if self.inside is None:
            return
        slots = compact(self.inside[:, :-1])
        keys, values = self.estimates(slots)
        size = max(1, slots.shape[1]) if query.shape[2] <= MAX_CODED_QUERIES else PAGE
        gaps = bool((slots < 0).any())
        with self.meter.holding(keys.at, keys.cells, values.cells):
            for start in range(0, slots.shape[1], size):
                stop = start + size
                if self.listens:
                    self._yielded.append(slots[:, start:stop])
                yield Piece(keys.part(start, stop), values.part(start, stop), slots[:, start:stop], gaps=gaps)

    def estimates(self, slots: Tensor) -> tuple[Estimates, Estimates]:
        """Return estimates of the entries at ``slots`` (lanes, n)."""
        assert self.sketches is not None
        at = self.hashed.at(slots, self.size)
        keys, values = (sketch.estimates(at, self.meter) for sketch in self.sketches)
        return keys, values

    def _delete(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract the estimates of the entries at ``slots`` (lanes, n) from the sketches, and return them."""
        assert self.sketches is not None
        at, there, found = self.hashed.at(slots, self.size), slots >= 0, []
        for sketch, estimates in zip(self.sketches, self.estimates(slots), strict=True):
            found.append(estimates.dense(sketch.cells.dtype))
            sketch.delete(at, found[-1], there)
        self.inside = _put(self.inside, slots, False)
        return found[0], found[1]

    # -- entries come back --------------------------------------------------------------------------

    def observe(self, weights: Sequence[Tensor], queries: int, resident: WorkingSet) -> None:
        if not weights or self.scores is None:
            return
        slots, self._yielded = torch.cat(self._yielded, 1), []
        observed = resident.observed(slots, _got(self.scores, slots), torch.cat([*weights], 1), queries)
        self.scores = _put(self.scores, slots, observed)

    def swap(self, resident: WorkingSet, length: int) -> None:
        if self.inside is None or self.scores is None:
            return
        columns = resident.banks.columns
        count = min(SWAPS, columns, self.inside.shape[1] - 1)
        for _ in range(0, columns, max(1, count)):
            inside, scores = self.inside[:, :-1], self.scores[:, :-1]
            slots = torch.arange(inside.shape[1], dtype=torch.int32, device=inside.device)
            ranks = resident.ranks(slots.masked_fill(~inside, -1), scores)
            ranks, best = _highest(ranks, count)
            chosen = (resident.lowest(count) * self.swap_at < ranks) & (ranks > float("-inf"))
            if not chosen.any():
                return
            slots = best.masked_fill(~chosen, -1)
            resident.swap_in(slots, *self._delete(slots), _got(self.scores, slots))
            if not chosen.all(1).any():
                return

    # -- the cache contract -------------------------------------------------------------------------

    def states(self, lanes: int, length: int) -> Tensor:
        codes = super().states(lanes, length)
        if self.inside is not None:
            inside = self.inside[:, :-1][:, :length].cpu()
            codes[:, : inside.shape[1]].masked_fill_(inside, EntryState.SKETCHED)
        return codes

    def truncate(self, length: int, resident: WorkingSet) -> None:
        """Subtract the estimates of the forgotten entries; their errors stay as noise."""
        if self.inside is not None and self.inside[:, length:-1].any():
            slots = compact(self.inside[:, length:-1])
            self._delete(torch.where(slots < 0, slots, slots + length))
        self.hashed.clear()

    def select(self, lanes: Tensor) -> None:
        self.hashed.clear()
        if self.sketches is None or self.inside is None:
            return
        lanes = lanes.to(self.inside.device)
        for sketch in self.sketches:
            sketch.select(lanes)
        self.inside = self.inside.index_select(0, lanes)
        self.scores = None if self.scores is None else self.scores.index_select(0, lanes)

    def state(self) -> dict[str, Tensor]:
        if self.sketches is None or self.inside is None:
            return {}
        saved = {"inside": self.inside} | ({} if self.scores is None else {"scores": self.scores})
        for name, sketch in zip(("keys", "values"), self.sketches, strict=True):
            saved |= {f"{name}.{number}": part for number, part in enumerate(sketch.state())}
        return saved

    def restore(self, state: dict[str, Tensor]) -> None:
        if "inside" not in state:
            return
        self.inside, self.scores = state["inside"], state.get("scores")
        self.sketches = self.empty(state["keys.0"], state["values.0"])
        for name, sketch in zip(("keys", "values"), self.sketches, strict=True):
            sketch.restore([state[key] for key in sorted(state) if key.startswith(f"{name}.")])

    def check(self, extent: Extent) -> None:
        if self.sketches is None or self.inside is None:
            return
        fits("inside", self.inside, (extent.lanes, None), torch.bool)
        if bool(self.inside[:, extent.slots :].any()) or (self.scores is None and self.listens):
            raise ShapeError("'inside' has slots that there are not")
        if self.scores is not None:
            fits("scores", self.scores, self.inside.shape, torch.float32)
        widths = zip(self.sketches, (extent.key_dim, extent.value_dim), strict=True)
        fresh = self.empty(*(sketch.cells.new_zeros(extent.lanes, 1, dim) for sketch, dim in widths))
        for sketch, new in zip(self.sketches, fresh, strict=True):
            fits_each("cells", sketch.state(), new.state(), ())
            fits("cells", sketch.cells, new.cells.shape, self.sketches[0].cells.dtype)

    @property
    def compressed_bytes(self) -> int:
        return 0 if self.sketches is None else sum(sketch.nbytes for sketch in self.sketches)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of flags and scores, and of the places of every slot."""
        return nbytes(self.inside, self.scores) + (self.hashed.nbytes if self.leads else 0)


def _highest(ranks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` highest of ``ranks`` (lanes, n) float32, and their indices. Of entries with equal ranks, the
    older one comes first; entries that share slots have equal estimates."""
    bits = (ranks + 0.0).view(torch.int32)  # no negative zeros
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # integers in the order of the floats
    best = (ordered - torch.arange(ranks.shape[1], device=ranks.device)).topk(count, dim=1).indices
    return ranks.gather(1, best), best


def _put(table: Tensor | None, slots: Tensor, what: Tensor | bool) -> Tensor:
    """Write ``what`` at ``slots`` (lanes, n), -1 for none, of a table (lanes, slots + 1), whose last column is for -1.
    The table grows as needed. table: None for a new table of zeros."""
    needed = int(slots.max()) + 2 if slots.numel() else 1
    if table is None or table.shape[1] < needed:
        size = max(256, needed + needed // 2)
        dtype = torch.bool if isinstance(what, bool) else what.dtype
        grown = torch.zeros(slots.shape[0], size, dtype=dtype, device=slots.device)
        if table is not None:
            grown[:, : table.shape[1] - 1] = table[:, :-1]
        table = grown
    index = torch.where(slots < 0, table.shape[1] - 1, slots).long()
    table.scatter_(1, index, what)
    table[:, -1] = 0
    return table


def _got(table: Tensor, slots: Tensor) -> Tensor:
    """Return a table's elements at ``slots`` (lanes, n); for -1 the zero of its last column."""
    return table.gather(1, torch.where((slots < 0) | (slots >= table.shape[1]), table.shape[1] - 1, slots).long())
