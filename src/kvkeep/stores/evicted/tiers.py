"""Evicted entries in precision tiers: 16 bits, 8, 4, fewer, dropped. As more entries are evicted, the least attended
move down.

Entries form groups of 32, which move as a whole. Keys have a scale for each channel and group (KIVI, arXiv:2402.02750),
which is far better than one for each entry. Values have a scale for each entry, after channels are normalised to mean 0
and deviation 1. Codes cover the whole range: narrower bounds have less squared error and more divergence. Keys have
more bits than values, because a wrong key moves attention, while a wrong value is one of many in a mean. Entries that
wait for a full group are codes, too (:mod:`kvkeep.stores.evicted.waiting`).

The number of groups in a tier depends only on the number of all groups and on the bytes, so all KV heads have tensors
of the same shape. Each head chooses its groups. See :data:`~kvkeep.stores.evicted.tier_sizes.ABOVE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.extent import Extent, ShapeError, fits, fits_each, within
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.portable import summed
from kvkeep.step.plan import Span
from kvkeep.stores.evicted.coded import CodedKeys, Codes, encode, multiplied
from kvkeep.stores.evicted.groups import GROUP
from kvkeep.stores.evicted.tier_sizes import Bits, channel_bytes, prices, tier_counts, tiers
from kvkeep.stores.evicted.waiting import Waiting
from kvkeep.stores.slots import codes_of

PARTS = ("attention", "channels", "waiting")
"""Parts that can be left out, to measure their effect."""


class EntryGroups(NamedTuple):
    """Groups of entries as numbers."""

    keys: Tensor
    """(lanes, groups, GROUP, key_dim)"""
    values: Tensor
    """(lanes, groups, GROUP, value_dim)"""
    slots: Tensor
    """(lanes, groups, GROUP), -1 for none."""
    scores: Tensor
    """(lanes, groups, GROUP)"""

    @property
    def groups(self) -> int:
        return self.slots.shape[1]


@dataclass(frozen=True)
class NormalisedValues(Codes):
    """Values of some lanes, normalised by channel: codes (lanes, entries, dim packed), scale and offset (lanes,
    entries, 1)."""

    mean: Tensor
    """The mean of each channel, (lanes, 1, dim)."""
    deviation: Tensor
    """The standard deviation of each channel, (lanes, 1, dim)."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.codes.shape[0], 1, self.codes.shape[1], self.mean.shape[2]

    @property
    def width(self) -> int:
        """Channels of a part: all."""
        return self.mean.shape[2]

    def mix(self, weights: Tensor) -> Tensor:
        mixed = multiplied(weights * self.scale.float().transpose(1, 2), self.codes, self.bits)
        mixed += weights @ self.offset.float()
        return mixed.mul_(self.deviation).add_(weights.sum(-1, keepdim=True) * self.mean)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self._numbers().mul_(self.deviation).add_(self.mean).to(dtype)


class Channels(NamedTuple):
    """Mean and standard deviation of the channels of values, (lanes, 1, value_dim) float32 each."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, entries: EntryGroups) -> Channels:
        """Return the mean and deviation over some entries, without empty places."""
        there = (entries.slots.flatten(1) >= 0)[..., None]
        number = there.sum(1, keepdim=True).clamp(min=1)
        values = entries.values.flatten(1, 2).float()
        mean = summed(values * there, 1) / number
        deviation = (summed(((values - mean) * there).square(), 1) / number).sqrt().clamp(min=1e-3)
        return cls(mean, torch.where(there.any(1, keepdim=True), deviation, 1.0))


class Tier:
    """Groups of one layer at ``bits``."""

    def __init__(self, bits: Bits) -> None:
        self.bits = bits
        self.parts: list[Tensor] = []
        """Codes, scales and offsets of keys, then of values, (lanes, groups, ...) each."""
        self.holes = False  # whether some slots are -1

    @property
    def groups(self) -> int:
        return self.parts[0].shape[1] if self.parts else 0

    def settle(
        self, slots: Tensor, scores: Tensor, coming: EntryGroups, count: int, channels: Channels, meter: Meter
    ) -> tuple[Tensor, Tensor, EntryGroups]:
        """Keep the ``count`` most attended groups among the present groups, with ``slots`` and ``scores`` (lanes,
        groups, GROUP), and the ``coming`` ones. Return slots and scores of the kept groups, and the groups that move
        down."""
        groups = self.groups
        if not groups and not count:
            return slots, scores, coming
        encoded = self.encode(coming.keys, coming.values, channels)
        parts = [torch.cat(pair, 1) for pair in zip(self.parts, encoded, strict=True)] if groups else encoded
        slots, scores = torch.cat([slots, coming.slots], 1), torch.cat([scores, coming.scores], 1)
        if slots.shape[1] <= count:
            layout = torch.contiguous_format  # the kernel's layout, and a copy releases a larger tensor
            self.parts = parts if groups else [part.clone(memory_format=layout) for part in parts]
            return slots, scores, EntryGroups(*(part[:, :0] for part in coming))
        with meter.holding(*parts):
            order = summed(scores.masked_fill(slots < 0, 0.0), 2)[..., 0].argsort(dim=1, descending=True, stable=True)
            falling, staying = order[:, count:], order[:, :count]
            keys, values = self._written(picked(parts, falling), channels, coming.keys.dtype)
            if coming.groups:  # new groups that pass through are not encoded here
                new = (falling - groups).clamp(min=0)
                passes = (falling >= groups)[..., None, None]
                keys = torch.where(passes, picked([coming.keys], new)[0], keys)
                values = torch.where(passes, picked([coming.values], new)[0], values)
            left = EntryGroups(keys, values, *picked([slots, scores], falling))
            self.parts = picked(parts, staying)
        return *picked([slots, scores], staying), left  # type: ignore[return-value]

    def encode(self, keys: Tensor, values: Tensor, channels: Channels) -> list[Tensor]:
        """Return the parts of groups of keys and values (lanes, groups, GROUP, dim)."""
        even, bits = (values.float() - channels.mean[:, None]) / channels.deviation[:, None], self.bits
        return [*encode(keys.transpose(2, 3), bits.keys), *encode(even, bits.values)]

    def _written(self, parts: list[Tensor], channels: Channels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = self._coded(parts, channels)
        return keys.dense(dtype).unflatten(1, (-1, GROUP)), values.dense(dtype).unflatten(1, (-1, GROUP))

    def read(self, channels: Channels) -> tuple[CodedKeys, NormalisedValues]:
        """Return keys and values for attention."""
        return self._coded(self.parts, channels)

    def _coded(self, parts: list[Tensor], channels: Channels) -> tuple[CodedKeys, NormalisedValues]:
        rows = (part.flatten(1, 2) for part in parts[3:])
        keys = CodedKeys(*parts[:3], self.bits.keys)  # type: ignore[call-arg, arg-type]
        return keys, NormalisedValues(*rows, self.bits.values, *channels)  # type: ignore[call-arg, arg-type]


class Tiers(EvictedStore):
    """One layer's tiers, and the entries that wait for a full group. limit: bytes of a lane for groups. width: bytes of
    a number of the model. without: one of :data:`PARTS`, or none. The store listens: scores of evicted entries still
    change, so that a group ranks by the attention it receives. Without attention a score is a slot, and the newest
    entries rank highest.
    """

    listens = True

    def __init__(self, limit: int, key_dim: int, value_dim: int, width: int, meter: Meter, without: str = "") -> None:
        self.meter, self.without = meter, without
        self.prices = prices(key_dim, value_dim, width)
        self.limit = limit - channel_bytes(value_dim)
        self.tiers = [Tier(bits) for bits in tiers(width)]
        self.waiting = Waiting(width, without != "waiting")
        self.slots: Tensor | None = None
        """(lanes, entries), -1 for none, tier by tier; the last GROUP columns are for waiting entries."""
        self.scores: Tensor | None = None
        """(lanes, entries), in the same order."""
        self.gaps = False  # whether some of their slots are -1
        self.channels: Channels | None = None
        self._spans: list[Span] | None = None  # tiers and waiting entries; valid for these tensors

    # -- entries come, and fall ---------------------------------------------------------------------

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        assert left.scores is not None
        scores = left.scores if self.without != "attention" else left.slots.to(left.scores)
        fresh = [left.keys, left.values, left.slots, scores]
        if self.slots is None or self.scores is None:
            size = left.keys.shape[0], GROUP
            self.slots, self.scores = left.slots.new_full(size, -1), left.scores.new_zeros(size)
        self.gaps |= left.holes and bool((left.slots < 0).any())
        start = self.waiting.count
        count = start + left.slots.shape[1]
        if not self.waiting.parts:
            self._begin(fresh)
        if count >= GROUP:
            if start:
                keys, values = (part.dense(left.keys.dtype) for part in self.waiting.read(start))
                waited = keys, values, self.slots[:, -GROUP:][:, :start], self.scores[:, -GROUP:][:, :start]
                fresh = [torch.cat([old, new], 1) for old, new in zip(waited, fresh, strict=True)]
            if count >= 2 * GROUP:  # entries with similar attention share a group
                order = fresh[3].masked_fill(fresh[2] < 0, float("-inf")).argsort(dim=1, stable=True)
                fresh = picked(fresh, order)
            grouped = count // GROUP * GROUP
            with self.meter.holding(*fresh[:2]):
                self._fall(EntryGroups(*(part[:, :grouped].unflatten(1, (-1, GROUP)) for part in fresh)))
                self._begin(fresh)
            fresh, start, count = [part[:, grouped:] for part in fresh], 0, count - grouped
        self.waiting.add(*fresh[:2])
        self.slots[:, -GROUP:][:, start:count], self.scores[:, -GROUP:][:, start:count] = fresh[2:]

    def _begin(self, fresh: Sequence[Tensor]) -> None:
        """Begin a group of waiting entries, with bounds from the present keys, values and slots."""
        self._spans = None
        self.waiting.begin(fresh[:2], fresh[2] >= 0 if self.gaps else None)

    def _fall(self, coming: EntryGroups) -> None:
        assert self.slots is not None and self.scores is not None
        if self.channels is None:
            self.channels = Channels.of(coming)
            if self.without == "channels":
                self.channels = Channels(self.channels.mean.zero_(), self.channels.deviation.fill_(1.0))
        counts = tier_counts(self.limit, self.prices, self.groups + coming.groups)
        spare = start = 0  # unused groups of higher tiers; groups never rise
        every: list[tuple[Tensor, Tensor]] = []
        for tier, count in zip(self.tiers, counts, strict=True):
            stop = start + tier.groups * GROUP
            slots, scores = (part[:, start:stop].unflatten(1, (-1, GROUP)) for part in (self.slots, self.scores))
            start, spare = stop, spare + count
            if coming.groups or tier.groups > spare:
                slots, scores, coming = tier.settle(slots, scores, coming, spare, self.channels, self.meter)
            every.append((slots.flatten(1), scores.flatten(1)))
            spare -= tier.groups
        empty = torch.stack([(slots < 0).any() for slots, _ in every]).tolist()  # one transfer from the device for all
        for tier, holes in zip(self.tiers, empty, strict=True):
            tier.holes = holes
        every.append((self.slots[:, -GROUP:], self.scores[:, -GROUP:]))
        self.slots, self.scores = (torch.cat(parts, 1) for parts in zip(*every, strict=True))

    @property
    def groups(self) -> int:
        return sum(tier.groups for tier in self.tiers)

    # -- what attention sees ------------------------------------------------------------------------

    def _places(self) -> Iterator[tuple[Tier | None, Tensor]]:
        """Yield each tier, and None for the waiting entries, with a view of its slots (lanes, n)."""
        start = 0
        if self.slots is None:
            return
        for tier in self.tiers:
            if tier.groups:
                stop = start + tier.groups * GROUP
                yield tier, self.slots[:, start:stop]
                start = stop
        if self.waiting.count:
            yield None, self.slots[:, start : start + self.waiting.count]

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        for tier, slots in self._places():
            if tier is None:
                yield Piece(*self.waiting.read(self.waiting.count), slots, holes=self.gaps)
                continue
            assert self.channels is not None
            keys, values = tier.read(self.channels)
            # Attention decodes the codes into temporary numbers.
            size = 4 * slots.numel() * max(keys.shape[3], values.shape[3])
            self.meter.hold(size)
            yield Piece(keys, values, slots, holes=tier.holes)
            self.meter.hold(-size)

    def spans(self) -> Sequence[Span] | None:
        if self.gaps or any(tier.holes for tier in self.tiers):
            return None
        if not self.waiting.parts:
            return ()
        if self._spans is None:
            pairs: list[tuple[Any, Any]] = [self.waiting.read()]
            if self.channels is not None:
                pairs = [*(tier.read(self.channels) for tier in self.tiers if tier.groups), *pairs]
            self._spans = [Span(*pair, 0, pair[0].shape[2]) for pair in pairs]
        self._spans[-1].stop = self.waiting.count
        return self._spans if self.waiting.count else self._spans[:-1]

    def observe(self, weights: Sequence[Tensor], queries: int, resident: WorkingSet) -> None:
        if not weights or self.slots is None or self.scores is None or self.without == "attention":
            return
        used = self.groups * GROUP + self.waiting.count
        slots, scores = (part[:, :used] for part in (self.slots, self.scores))
        scores.copy_(resident.observed(slots, scores, torch.cat([*weights], 1), queries))

    def states(self, lanes: int, length: int) -> Tensor:
        states = EntryState.QUANTISED, EntryState.RESIDENT
        return codes_of(lanes, length, ((slots, states[tier is None]) for tier, slots in self._places()))

    # -- the cache contract -------------------------------------------------------------------------

    def _strike(self, slots: Tensor) -> None:
        """Replace the slots after some were removed."""
        self.gaps = True
        for tier in self.tiers:
            tier.holes = True
        self.slots = slots

    def truncate(self, length: int, resident: WorkingSet) -> None:
        if self.slots is not None:
            self._strike(self.slots.masked_fill(self.slots >= length, -1))

    def _tensors(self) -> dict[str, list[Tensor]]:
        """Return all tensors by the name of their holder."""
        named = {str(number): tier.parts for number, tier in enumerate(self.tiers) if tier.groups}
        if self.slots is not None and self.scores is not None:
            named["waiting"] = self.waiting.parts
            named["places"] = [self.slots, self.scores]
        if self.channels is not None:
            named["channels"] = [*self.channels]
        return named

    def _put(self, named: dict[str, list[Tensor]]) -> None:
        """Replace all tensors, in the form that :meth:`_tensors` returns."""
        self._spans = None
        for number, tier in enumerate(self.tiers):
            tier.parts = named.get(str(number), tier.parts)
        if "places" in named:
            self.waiting.parts = named["waiting"]
            self.slots, self.scores = named["places"]
        if "channels" in named:
            self.channels = Channels(*named["channels"])

    def select(self, lanes: Tensor) -> None:
        tensors = self._tensors().items()
        self._put({name: [one.index_select(0, lanes.to(one.device)) for one in parts] for name, parts in tensors})

    def state(self) -> dict[str, Tensor]:
        saved = {f"{name}.{number}": one for name, parts in self._tensors().items() for number, one in enumerate(parts)}
        return saved | {"counts": torch.tensor([self.waiting.count, *(tier.holes for tier in self.tiers)])}

    def restore(self, state: dict[str, Tensor]) -> None:
        named: dict[str, list[Tensor]] = {}
        for key in sorted(key for key in state if key != "counts"):  # fewer than ten per name, so they sort in order
            named.setdefault(key.partition(".")[0], []).append(state[key])
        self._put(named)
        self.waiting.count, *holes = state["counts"].tolist()
        self.gaps = True  # not saved
        for tier, flag in zip(self.tiers, holes, strict=True):
            tier.holes = bool(flag)

    def check(self, extent: Extent) -> None:
        within("counts", self.waiting.count, 0, GROUP)
        if self.slots is None:
            if self.waiting.count or self.groups:
                raise ShapeError("groups are there before their first entries")
            return
        places = (extent.lanes, (self.groups + 1) * GROUP)
        extent.numbered("slots", self.slots, places)
        fits("scores", self.scores, places, torch.float32)
        dims = extent.key_dim, extent.value_dim
        fits_each("waiting", self.waiting.parts, self.waiting.form(extent.lanes, *dims), (extent.lanes,))
        if self.channels is None:
            within("groups", self.groups, 0, 1)
            return
        for one in self.channels:
            fits("channels", one, (extent.lanes, 1, extent.value_dim), torch.float32)
        for tier in self.tiers:
            if tier.groups:
                keys, values = (torch.zeros(extent.lanes, 1, GROUP, dim) for dim in dims)
                made = tier.encode(keys, values, self.channels)
                fits_each("tiers", tier.parts, made, (extent.lanes, tier.groups))

    @property
    def compressed_bytes(self) -> int:
        channels = () if self.channels is None else self.channels
        return sum(nbytes(*tier.parts) for tier in self.tiers) + nbytes(*channels, *self.waiting.parts)

    @property
    def bookkeeping_bytes(self) -> int:
        return nbytes(self.slots, self.scores)


def picked(tensors: list[Tensor], index: Tensor) -> list[Tensor]:
    """Gather ``index`` (lanes, n) along the second axis of each."""
    return [
        one.gather(1, index.view(*index.shape, *[1] * (one.ndim - 2)).expand(-1, -1, *one.shape[2:])) for one in tensors
    ]
