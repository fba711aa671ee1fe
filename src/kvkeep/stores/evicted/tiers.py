"""Evicted entries in precision tiers: 16 bits, 8, 4, fewer, dropped. As more entries are evicted, the least attended
move down.

Entries form groups of 32, which move as a whole. Keys have a scale for each channel and group (KIVI, arXiv:2402.02750),
which is far better than one for each entry. Values have a scale for each entry, after channels are normalised to mean 0
and deviation 1. Codes cover the whole range: narrower bounds have less squared error and more divergence. Keys have
more bits than values, because a wrong key moves attention, while a wrong value is one of many in a mean.

Entries that wait for a full group are codes, too, with half the bits of the model's numbers. Without codes, the up to
31 entries would take most of a small budget. Their channels have bounds (:class:`ByChannel`) from the entries that are
present when the last group is made; numbers beyond the bounds are clamped.

The number of groups in a tier depends only on the number of all groups and on the bytes, so all KV heads have tensors
of the same shape. Each head chooses its groups. See :data:`~kvkeep.stores.evicted.tier_sizes.ABOVE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention.portable import summed
from kvkeep.contracts.entries import EvictedEntries, gathered
from kvkeep.contracts.resident import WorkingSet
from kvkeep.memory.extent import Extent, ShapeError, fits_each, within
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.step.plan import Span
from kvkeep.stores.evicted.coded import ByChannel, CodedKeys, NormalisedValues, encode
from kvkeep.stores.evicted.groups import GROUP, EncodedGroups, FewBits, Groups
from kvkeep.stores.evicted.tier_sizes import Bits, channel_bytes, prices, tier_counts, tiers, waiting_form


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


def channels_of(entries: EntryGroups) -> list[Tensor]:
    """Return the mean and the deviation of each channel of values over some entries, without empty places: (lanes, 1,
    value_dim) float32 each."""
    there = (entries.slots.flatten(1) >= 0)[..., None]
    number = there.sum(1, keepdim=True).clamp(min=1)
    values = entries.values.flatten(1, 2).float()
    mean = summed(values * there, 1) / number
    deviation = (summed(((values - mean) * there).square(), 1) / number).sqrt().clamp(min=1e-3)
    return [mean, torch.where(there.any(1, keepdim=True), deviation, 1.0)]


class Tier(FewBits):
    """Groups of one layer at ``bits``."""

    def __init__(self, bits: Bits, meter: Meter) -> None:
        self.bits, self.meter = bits, meter
        self.parts: list[Tensor] = []
        """Codes, scales and offsets of keys, then of values, then slots and scores, (lanes, groups, ...) each."""
        self.channels: list[Tensor] = []
        """The mean and deviation of the channels of values, (lanes, 1, value_dim) each, the same in all tiers."""
        self.gaps = False  # whether some slots are -1

    @property
    def groups(self) -> int:
        return self.parts[0].shape[1] if self.parts else 0

    def settle(self, coming: EntryGroups, count: int) -> EntryGroups:
        """Keep the ``count`` most attended groups among the present and the ``coming`` ones. Return those that move
        down."""
        groups = self.groups
        if not groups and not count:
            return coming
        parts = [*self.encode(*coming[:3]), coming.slots, coming.scores]
        if groups:
            parts = [torch.cat(pair, 1) for pair in zip(self.parts, parts, strict=True)]
        if parts[0].shape[1] <= count:
            layout = torch.contiguous_format  # the kernel's layout, and a copy releases a larger tensor
            self.parts = parts if groups else [part.clone(memory_format=layout) for part in parts]
            return EntryGroups(*(part[:, :0] for part in coming))
        with self.meter.holding(*parts[:-2]):
            slots, scores = parts[-2:]
            order = summed(scores.masked_fill(slots < 0, 0.0), 2)[..., 0].argsort(dim=1, descending=True, stable=True)
            falling, staying = order[:, count:], order[:, :count]
            *codes, slots, scores = (gathered(part, falling) for part in parts)
            keys, values = (part.dense(coming.keys.dtype).unflatten(1, (-1, GROUP)) for part in self.coded(codes))
            if coming.groups:  # new groups that pass through are not encoded here
                new = (falling - groups).clamp(min=0)
                passes = (falling >= groups)[..., None, None]
                keys = torch.where(passes, gathered(coming.keys, new), keys)
                values = torch.where(passes, gathered(coming.values, new), values)
            self.parts = [gathered(part, staying) for part in parts]
        return EntryGroups(keys, values, slots, scores)

    def encode(self, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        """Return the codes of groups of keys and values (lanes, groups, GROUP, dim)."""
        mean, deviation = self.channels
        even = (values.float() - mean[:, None]) / deviation[:, None]
        return [*encode(keys.transpose(2, 3), self.bits.keys), *encode(even, self.bits.values)]

    def coded(self, parts: list[Tensor]) -> tuple[CodedKeys, NormalisedValues]:
        rows = (part.flatten(1, 2) for part in parts[3:6])
        keys = CodedKeys(*parts[:3], self.bits.keys)  # type: ignore[call-arg, arg-type]
        return keys, NormalisedValues(*rows, self.bits.values, *self.channels)  # type: ignore[call-arg, arg-type]


class Tiers(Groups):
    """One layer's tiers. limit: bytes of a lane for groups. width: bytes of a number of the model. The store listens:
    scores of evicted entries still change, so that a group ranks by the attention it receives.

    Waiting entries are codes (lanes, GROUP, dim) of keys and values, slots and scores.
    """

    listens = True

    def __init__(self, limit: int, key_dim: int, value_dim: int, width: int, meter: Meter) -> None:
        super().__init__()
        self.meter, self.width = meter, width
        self.prices = prices(key_dim, value_dim, width)
        self.limit = limit - channel_bytes(value_dim)
        self.tiers = [Tier(bits, meter) for bits in tiers(width)]
        self.bounds: list[Tensor] = []  # scale and offset of waiting keys, then of values, (lanes, 1, dim) each
        self._read: tuple[list[Span], tuple[Any, Any]] | None = None  # tiers, waiting entries; until these are new ones

    # -- entries come, and fall ---------------------------------------------------------------------

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        fresh: list[Tensor] = [*left[:4]]  # type: ignore[list-item]
        self.waiting_gaps |= left.gaps and bool((left.slots < 0).any())
        if not self.waiting:
            self._begin(fresh)
        start, count = self.count, self.count + left.slots.shape[1]
        if count >= GROUP:
            if start:
                keys, values = (part.dense(left.keys.dtype) for part in self.waits(start))
                waited = keys, values, *(part[:, :start] for part in self.waiting[2:])
                fresh = [torch.cat([old, new], 1) for old, new in zip(waited, fresh, strict=True)]
            if count >= 2 * GROUP:  # entries with similar attention share a group
                order = fresh[3].masked_fill(fresh[2] < 0, float("-inf")).argsort(dim=1, stable=True)
                fresh = [gathered(part, order) for part in fresh]
            grouped = count // GROUP * GROUP
            with self.meter.holding(*fresh[:2]):
                self._fall(EntryGroups(*(part[:, :grouped].unflatten(1, (-1, GROUP)) for part in fresh)))
                self._begin(fresh)
            fresh, start, count = [part[:, grouped:] for part in fresh], 0, count - grouped
        codes = (kept.encoded(numbers) for kept, numbers in zip(self.waits(GROUP), fresh, strict=False))
        for kept, new in zip(self.waiting, (*codes, *fresh[2:]), strict=True):
            kept[:, start:count] = new
        self.count = count

    def _begin(self, fresh: Sequence[Tensor]) -> None:
        """Begin a group of waiting entries, with bounds from the present keys, values and slots."""
        keys, values, slots, scores = fresh
        there = slots >= 0 if self.waiting_gaps else None
        codes, scales = waiting_form(self.width)
        kept = [ByChannel.within(numbers, there, GROUP, codes, scales) for numbers in (keys, values)]
        size = len(slots), GROUP
        self.waiting = [*(one.codes for one in kept), slots.new_full(size, -1), scores.new_zeros(size)]
        self.bounds = [part for one in kept for part in (one.scale, one.offset)]
        self._read, self.count = None, 0

    def _fall(self, coming: EntryGroups) -> None:
        if not self.tiers[0].channels:
            self._normalise(channels_of(coming))
        counts = tier_counts(self.limit, self.prices, sum(tier.groups for tier in self.tiers) + coming.groups)
        spare = 0  # unused groups of higher tiers; groups never rise
        for tier, count in zip(self.tiers, counts, strict=True):
            spare += count
            if coming.groups or tier.groups > spare:
                coming = tier.settle(coming, spare)
            spare -= tier.groups
        present = [tier for tier in self.tiers if tier.groups]
        empty = torch.stack([(tier.parts[-2] < 0).any() for tier in present]).tolist()  # one transfer from the device
        for tier, gaps in zip(present, empty, strict=True):
            tier.gaps = gaps

    def _normalise(self, channels: list[Tensor]) -> None:
        for tier in self.tiers:
            tier.channels = channels

    # -- what attention sees ------------------------------------------------------------------------

    def groups(self) -> Iterator[EncodedGroups]:
        for tier in self.tiers:
            if tier.groups:
                yield EncodedGroups(tier, tier.parts, tier.parts[-2], tier.gaps)

    def waits(self, count: int) -> tuple[ByChannel, ByChannel]:
        keys, values, *_ = self.waiting
        return ByChannel(keys[:, :count], *self.bounds[:2]), ByChannel(values[:, :count], *self.bounds[2:])

    def spans(self) -> Sequence[Span] | None:
        kept = [*self.groups()]
        if self.waiting_gaps or any(one.gaps for one in kept):
            return None
        if not self.waiting:
            return ()
        if self._read is None:
            tiers = [tier.coded(tier.parts) for tier in self.tiers if tier.groups]
            self._read = [Span(key, value, 0, key.shape[2]) for key, value in tiers], self.waits(GROUP)
        spans, waiting = self._read
        return [*spans, Span(waiting[0], waiting[1], 0, self.count)] if self.count else spans

    def observe(self, weights: Sequence[Tensor], queries: int, resident: WorkingSet) -> None:
        if not weights or not self.waiting:
            return
        present = [tier.parts[-2:] for tier in self.tiers if tier.groups]
        places = [[part.view(len(part), -1) for part in one] for one in present]
        places.append([part[:, : self.count] for part in self.waiting[2:]])
        slots, scores = (torch.cat(parts, 1) for parts in zip(*places, strict=True))
        found = resident.observed(slots, scores, torch.cat([*weights], 1), queries)
        for (_, kept), new in zip(places, found.split([one[0].shape[1] for one in places], 1), strict=True):
            kept.copy_(new)

    # -- the cache contract -------------------------------------------------------------------------

    def _emptied(self) -> Iterator[Tensor]:
        for tier in self.tiers:
            tier.gaps = True
        return super()._emptied()

    def tensors(self) -> dict[str, list[Tensor]]:
        tiers = {str(number): tier.parts for number, tier in enumerate(self.tiers)}
        return tiers | {"waiting": self.waiting, "bounds": self.bounds, "channels": self.tiers[0].channels}

    def put(self, named: dict[str, list[Tensor]]) -> None:
        self._read = None
        for number, tier in enumerate(self.tiers):
            tier.parts = named.get(str(number), [])
        self.waiting, self.bounds = named.get("waiting", []), named.get("bounds", [])
        self._normalise(named.get("channels", []))

    def state(self) -> dict[str, Tensor]:
        flags = [self.count, self.waiting_gaps, *(tier.gaps for tier in self.tiers)]
        return super().state() | {"counts": torch.tensor(flags)}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.count, waiting_gaps, *gaps = state["counts"].tolist()
        self.waiting_gaps = bool(waiting_gaps)
        for tier, flag in zip(self.tiers, gaps, strict=True):
            tier.gaps = bool(flag)

    def check(self, extent: Extent) -> None:
        within("counts", self.count, 0, GROUP)
        if not self.waiting:
            if self.count or any(tier.groups for tier in self.tiers):
                raise ShapeError("groups are there before their first entries")
            return
        keys, values = (torch.zeros(extent.lanes, 1, GROUP, dim) for dim in (extent.key_dim, extent.value_dim))
        places = [torch.zeros(1, 1, GROUP, dtype=dtype) for dtype in (torch.int32, torch.float32)]
        like = Tiers(0, extent.key_dim, extent.value_dim, self.width, self.meter)
        like._begin([*(part[:, 0] for part in (keys, values)), *(part[0].expand(extent.lanes, -1) for part in places)])
        like._normalise([torch.zeros(1, 1, extent.value_dim), torch.ones(1, 1, extent.value_dim)])
        fits_each("waiting", self.waiting, like.waiting, (extent.lanes,))
        fits_each("bounds", self.bounds, like.bounds, (extent.lanes,))
        extent.numbered("slots", self.waiting[2], (extent.lanes, None))
        channels = self.tiers[0].channels
        if not channels and not any(tier.groups for tier in self.tiers):
            return
        fits_each("channels", channels, like.tiers[0].channels, (extent.lanes,))
        for tier, form in zip(self.tiers, like.tiers, strict=True):
            if tier.parts:
                parts = [*form.encode(keys, values, places[0]), *places]
                fits_each("tiers", tier.parts, parts, (extent.lanes, tier.groups))
                extent.numbered("slots", tier.parts[-2], (extent.lanes, None, GROUP))

    @property
    def compressed_bytes(self) -> int:
        parts = [part for tier in self.tiers for part in tier.parts[:-2]]
        return nbytes(*parts, *self.tiers[0].channels, *self.waiting[:2], *self.bounds)

    @property
    def bookkeeping_bytes(self) -> int:
        return nbytes(*self.waiting[2:], *(part for tier in self.tiers for part in tier.parts[-2:]))
