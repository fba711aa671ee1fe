"""Evicted entries in another form, by groups of 32: a store keeps the newest groups, or groups in precision tiers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.contracts.part import PredictedBytes
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.extent import Extent, ShapeError, fits, fits_each, within
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.step import native
from kvkeep.step.plan import Destination, Span, StoreShare
from kvkeep.stores.slots import codes_of

GROUP = 32
"""Entries of a group."""


class Codec(ABC):
    """How a group is stored, and how attention reads it."""

    kept: ClassVar[EntryState]
    """The state of an entry in a group."""
    as_kept: ClassVar[bool] = False
    """Attention reads the parts themselves, without decoding, and reads all of them for any query."""

    @property
    def nbytes(self) -> int:
        """Bytes of the codec's data for reading groups."""
        return 0

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        """Encode one group: keys and values (lanes, GROUP, dim), slots (lanes, GROUP). Return its parts, (lanes, ...)
        each."""

    @abstractmethod
    def read(self, query: Tensor, parts: list[Tensor], slots: Tensor, gaps: bool) -> Iterator[Piece]:
        """Yield the entries of groups. parts: (lanes, groups, ...). slots: (lanes, groups, GROUP). gaps: some slots
        are -1."""


class FewBits(Codec):
    """Entries as codes, which attention reads without decoding."""

    kept = EntryState.QUANTISED
    as_kept = True
    meter: Meter

    @abstractmethod
    def coded(self, parts: list[Tensor]) -> tuple[Any, Any]:
        """Return keys and values as codes."""

    def read(self, query: Tensor, parts: list[Tensor], slots: Tensor, gaps: bool) -> Iterator[Piece]:
        keys, values = self.coded(parts)
        size = 4 * slots.numel() * max(keys.shape[3], values.shape[3])  # numbers that attention decodes codes into
        self.meter.hold(size)
        try:
            yield Piece(keys, values, slots.flatten(1), gaps=gaps)
        finally:
            self.meter.hold(-size)


class EncodedGroups(NamedTuple):
    """Encoded groups of one codec."""

    codec: Codec
    parts: list[Tensor]
    """(lanes, groups, ...)"""
    slots: Tensor
    """(lanes, groups, GROUP)"""
    gaps: bool
    """Whether some slots are -1."""


@dataclass(frozen=True, eq=False)
class View:
    """What the planned steps of some lanes read and write. It is valid until a group is written."""

    lanes: slice
    """Which lanes."""
    coded_spans: list[Span]
    """The groups."""
    waiting: tuple[Tensor, Tensor, Tensor]
    """Keys, values (lanes, GROUP, dim) of waiting entries, and the slots that steps evict, (lanes, 1)."""
    seen: Tensor | None
    """:attr:`LayerStep.seen`; None: no place is empty."""
    coded: int
    """The number of entries of the groups that are read."""
    readable: bool
    """Whether the native library reads the spans."""

    def spans(self, count: int) -> list[Span]:
        """Return the groups, and ``count`` waiting entries."""
        keys, values, _ = self.waiting
        return [*self.coded_spans, Span(keys, values, 0, count)] if count else self.coded_spans

    def holds(self, lanes: int, rows: int) -> bool:
        """Return whether it is of ``lanes`` lanes, and of at least ``rows`` resident entries."""
        wide = self.seen is None or self.seen.shape[1] >= self.coded + GROUP + rows
        return wide and self.lanes.stop - self.lanes.start == lanes


class Groups(EvictedStore):
    """Entries wait until they form a group, which is then encoded."""

    def __init__(self) -> None:
        self.waiting: list[Tensor] = []
        """Keys and values (lanes, GROUP, dim), slots (lanes, GROUP), and what else is known of each entry."""
        self.count = 0
        """The number of waiting entries."""
        self.waiting_gaps = False
        """Whether some slots of waiting entries are -1."""

    @abstractmethod
    def groups(self) -> Iterator[EncodedGroups]:
        """Yield the encoded groups, as views."""

    def waits(self, count: int) -> tuple[Any, Any]:
        """Return the first ``count`` waiting keys and values as attention reads them, (lanes, 1, count, dim)."""
        keys, values, *_ = self.waiting
        return keys[:, None, :count], values[:, None, :count]

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        for kept in self.groups():
            yield from kept.codec.read(query, kept.parts, kept.slots, kept.gaps)
        if self.count:
            yield Piece(*self.waits(self.count), self.waiting[2][:, : self.count], gaps=self.waiting_gaps)

    def states(self, lanes: int, length: int) -> Tensor:
        found = [(kept.slots.flatten(1), kept.codec.kept) for kept in self.groups()]
        if self.count:
            found.append((self.waiting[2][:, : self.count], EntryState.RESIDENT))
        return codes_of(lanes, length, found)

    def truncate(self, length: int, resident: WorkingSet) -> None:
        for slots in self._emptied():
            slots.masked_fill_(slots >= length, -1)

    def _emptied(self) -> Iterator[Tensor]:
        """Yield all slots, as views, some of which the caller replaces by -1."""
        if self.waiting:
            self.waiting_gaps = True
            yield from (kept.slots for kept in self.groups())
            yield self.waiting[2][:, : self.count]

    @abstractmethod
    def tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors, by the name of their holder: fewer than ten each."""

    @abstractmethod
    def put(self, named: dict[str, list[Tensor]]) -> None:
        """Replace all tensors, in the form that :meth:`tensors` returns."""

    def select(self, lanes: Tensor) -> None:
        tensors = self.tensors().items()
        self.put({name: [one.index_select(0, lanes.to(one.device)) for one in parts] for name, parts in tensors})

    def state(self) -> dict[str, Tensor]:
        return {f"{name}.{number}": one for name, parts in self.tensors().items() for number, one in enumerate(parts)}

    def restore(self, state: dict[str, Tensor]) -> None:
        named: dict[str, list[Tensor]] = {}
        for key in sorted(key for key in state if "." in key):
            named.setdefault(key.partition(".")[0], []).append(state[key])
        self.put(named)


class NewestGroups(Groups):
    """The newest groups. capacity: the maximum number of groups; beyond it a new group overwrites the oldest. None: no
    limit."""

    def __init__(self, capacity: int | None, codec: Codec) -> None:
        super().__init__()
        self.capacity, self.codec = capacity, codec
        self.parts: list[Tensor] = []  # (lanes, groups, ...)
        self.slots: Tensor | None = None  # (lanes, groups, GROUP)
        self.written = 0  # number of groups written
        self.gaps = False  # whether some slots are -1
        self._evicted = torch.empty(0)  # slots that a planned step evicts, (lanes, 1), -1 for none
        self._views: dict[int, View] = {}  # by first lane; valid for these tensors

    @property
    def max_entries(self) -> int | None:
        return None if self.capacity is None else self.capacity * GROUP

    @property
    def kept(self) -> int:
        return self.written if self.capacity is None else min(self.written, self.capacity)

    def groups(self) -> Iterator[EncodedGroups]:
        if self.kept and self.slots is not None:
            parts = [part[:, : self.kept] for part in self.parts]
            yield EncodedGroups(self.codec, parts, self.slots[:, : self.kept], self.gaps)

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        rows = left[:3]
        if not self.waiting:
            self.waiting = [one.new_full((len(one), GROUP, *one.shape[2:]), -1) for one in rows]
        if left.gaps and bool((left.slots < 0).any()):
            self.waiting_gaps, self._views = True, {}
        start, total = 0, left.slots.shape[1]
        while start < total:
            count = min(GROUP - self.count, total - start)
            for kept, one in zip(self.waiting, rows, strict=True):
                kept[:, self.count : self.count + count] = one[:, start : start + count]
            self.count += count
            start += count
            if self.count == GROUP:
                self._write()

    def _write(self) -> None:
        slots, self.count, self._views = self.waiting[2], 0, {}
        self.gaps = self.gaps or (self.waiting_gaps and bool((slots < 0).any()))
        parts = [*self.codec.encode(*self.waiting), slots]
        if self.slots is None or (self.kept == self.slots.shape[1] and self.kept != self.capacity):
            self._grow(parts)
        assert self.slots is not None
        place = self.written if self.capacity is None else self.written % self.capacity
        for kept, part in zip([*self.parts, self.slots], parts, strict=True):
            kept[:, place] = part
        self.written += 1

    def _grow(self, like: list[Tensor]) -> None:
        old = [] if self.slots is None else [*self.parts, self.slots]
        size = grown(self.kept, self.capacity)
        fresh = [part.new_empty(len(part), size, *part.shape[1:]) for part in like]
        fresh[-1].fill_(-1)  # -1 marks unwritten slots
        for part, before in zip(fresh, old, strict=False):
            part[:, : self.kept] = before[:, : self.kept]
        *self.parts, self.slots = fresh

    def plan(self, append: Destination, first_lane: int, evicts: int) -> StoreShare | None:
        if not self.waiting or not self.codec.as_kept or (evicts and self.count == GROUP - 1):
            return None  # a first group begins, or a group is encoded
        if not native.can_read(*self.waiting[:2]):
            return None
        view = self._view(first_lane, len(append.keys), append.keys.shape[1])
        if not view.readable:
            return None
        evict = None
        if evicts:
            keys, values, slots = view.waiting
            evict = Destination(keys, values, self.count, slots)
        else:
            self._evicted[view.lanes] = -1
        return StoreShare(view.spans(self.count + evicts), evict, view.seen)

    def commit(self) -> None:
        keys, values, slots = self.waiting
        place = slots[:, self.count]
        place.copy_(self._evicted[:, 0])
        if bool((empty := place < 0).any()):  # these lanes evicted nothing in this step
            keys[empty, self.count], values[empty, self.count], self.waiting_gaps = 0, 0, True
            if any(view.seen is None for view in self._views.values()):
                self._views = {}
            for view in self._views.values():
                assert view.seen is not None
                view.seen[:, view.coded + self.count] = ~empty[view.lanes]
        self.count += 1

    def spans(self) -> Sequence[Span] | None:
        if self.gaps or self.waiting_gaps or not self.codec.as_kept:
            return None
        if not self.waiting:
            return ()
        return self._view(0, len(self.waiting[2]), 0).spans(self.count)

    def _view(self, first: int, lanes: int, rows: int) -> View:
        """Return what steps of ``lanes`` lanes from ``first`` on read before their at most ``rows`` resident entries:
        groups without any entry are left out."""
        view = self._views.get(first)
        if view is not None and view.holds(lanes, rows):
            return view
        which = slice(first, first + lanes)
        keys, values, slots = (part[which] for part in self.waiting)
        groups = slots.new_empty(lanes, 0, GROUP) if self.slots is None else self.slots[which, : self.kept]
        runs, spans, seen = consecutive((groups >= 0).any(2).any(0).tolist()), list[Span](), None
        for start, stop in runs:
            parts = [part[which, start:stop] for part in self.parts]
            pieces = self.codec.read(keys[:0], parts, groups[:, start:stop], False)
            spans += [Span(piece.keys, piece.values, 0, piece.keys.shape[2]) for piece in pieces]
        coded = sum(span.entries for span in spans)
        readable = all(native.can_read(span.keys, span.values) for span in spans) and native.can_read(keys, values)
        if readable and (self.gaps or self.waiting_gaps):
            seen = torch.ones(lanes, coded + GROUP + rows, dtype=torch.bool, device=keys.device)
            known = [*(groups[:, start:stop].flatten(1) for start, stop in runs), slots[:, : self.count]]
            seen[:, : coded + self.count] = torch.cat(known, 1) >= 0
        if len(self._evicted) != len(self.waiting[2]):
            self._evicted = self.waiting[2].new_full((len(self.waiting[2]), 1), -1)
        view = View(which, spans, (keys, values, self._evicted[which]), seen, coded, readable)
        self._views[first] = view
        return view

    def _emptied(self) -> Iterator[Tensor]:
        if self.waiting:
            self.gaps, self._views = True, {}
        return super()._emptied()

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"waiting": self.waiting, "groups": [] if self.slots is None else [*self.parts, self.slots]}

    def put(self, named: dict[str, list[Tensor]]) -> None:
        self._views, self.waiting = {}, named.get("waiting", [])
        if named.get("groups"):
            *self.parts, self.slots = named["groups"]

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"counts": torch.tensor([self.count, self.waiting_gaps, self.written, self.gaps])}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.count, waiting_gaps, self.written, gaps = state["counts"].tolist()
        self.waiting_gaps, self.gaps = bool(waiting_gaps), bool(gaps)

    def check(self, extent: Extent) -> None:
        within("counts", self.count, 0, GROUP)
        if not self.waiting:
            if self.count or self.written or self.parts:
                raise ShapeError("groups are there before their first entries")
            return
        keys, values, slots = self.waiting
        if extent.entries(keys, values) != GROUP:
            raise ShapeError("a group has another number of entries")
        fits("slots", slots, (extent.lanes, GROUP), torch.int32)
        extent.numbered("slots", slots[:, : self.count], (extent.lanes, None))
        if not self.parts or self.slots is None:
            within("counts", self.written, 0, 1)
            return
        within("counts", self.written, 1, sys.maxsize)  # a recalled entry may be evicted and written again
        groups = self.slots.shape[1]
        within("groups", groups, self.kept, (groups if self.capacity is None else self.capacity) + 1)
        made = self.codec.encode(torch.zeros_like(keys), torch.zeros_like(values), torch.zeros_like(slots))
        fits_each("parts", self.parts, [one[:, None] for one in made], (extent.lanes, groups))
        fits("slots", self.slots, (extent.lanes, groups, GROUP), torch.int32)
        extent.numbered("slots", self.slots[:, : self.kept], (extent.lanes, None, GROUP))

    @property
    def compressed_bytes(self) -> int:
        return nbytes(*self.parts, *self.waiting[:2])

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots, for what planned steps see, and for the codec's data."""
        seen = (view.seen for view in self._views.values())
        return nbytes(self.slots, *self.waiting[2:], self._evicted, *seen) + self.codec.nbytes


def consecutive(chosen: Sequence[bool]) -> list[tuple[int, int]]:
    """Return where each run of consecutive chosen ones begins and stops."""
    padded = [False, *chosen, False]
    edges = [number for number, (before, one) in enumerate(pairwise(padded)) if one != before]
    return [*zip(edges[::2], edges[1::2], strict=True)]


def grown(groups: int, capacity: int | None) -> int:
    """Return the number of groups to allocate when ``groups`` are full: half more."""
    size = max(8, groups + groups // 2)
    return size if capacity is None else min(capacity, size)


def allocated(written: int, capacity: int | None) -> int:
    """Return the number of groups allocated after ``written`` groups."""
    size = 0
    while size < (written if capacity is None else min(written, capacity)):
        size = grown(size, capacity)
    return size


def group_holds(
    layer: LayerGeometry, geometry: ModelGeometry, capacity: int | None, left: Sequence[int], size: int, number: int
) -> PredictedBytes:
    """Return the bytes of a store whose groups have ``size`` bytes a lane. left: the number of entries that a lane
    evicts in each pass. number: the temporary bytes for an entry of a lane in attention."""
    count, heads = sum(left), layer.kv_heads
    if not count:
        return PredictedBytes()
    groups = allocated(count // GROUP, capacity)
    groups_held = count // GROUP if capacity is None else min(count // GROUP, capacity)
    waiting = GROUP * layer.entry_elements * geometry.dtype_bytes
    return PredictedBytes(
        compressed=heads * groups * size + waiting,
        bookkeeping=4 * heads * GROUP * (groups + 1),
        workspace=heads * GROUP * groups_held * number,
        entries=GROUP * groups_held + count % GROUP,
    )
