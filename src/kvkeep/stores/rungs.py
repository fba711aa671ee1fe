"""Entries that left, on a ladder: 16 bits, 8, 4, fewer, gone. As more come, the least attended fall a rung.

Entries come in groups of 32, and a group falls as a whole: keys have a scale for each channel and group (KIVI,
arXiv:2402.02750), which is far better than one for each entry, values one for each entry, of channels brought to mean 0
and deviation 1. The bounds of a code may lie within those of the numbers where that is nearer to them (clipping). Keys
keep more bits than values: a wrong key moves attention, a wrong value is one of many in a mean.

**How many groups a rung holds** follows from how many there are and from the bytes alone, so all KV heads have the same
tensors; which groups these are is each head's own. See :data:`ABOVE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.stores.coded import CodedKeys, encode, multiplied, unpack
from kvkeep.stores.groups import GROUP
from kvkeep.stores.meter import Meter, nbytes


class Bits(NamedTuple):
    """Bits of a number in keys and in values."""

    keys: int
    values: int


RUNGS = (Bits(16, 16), Bits(8, 8), Bits(4, 4), Bits(4, 2))
"""Bits of the rungs. The first is the model's own numbers where these have 16 bits."""

ABOVE = (2.15, 0.95, 0.4, 0.0)
"""How far above the depth at which entries are gone each rung ends, as a share of all groups. An entry is worth a rung
while its squared share of the attention times the squared error that is spared exceeds a price in bytes. The attention
of groups, in order, falls about like exp(-2.7 r/R) (rank r of R; SmolLM2, 1,024 tokens); so rungs end at differences of
ln(error spared a byte) / 5.4, by the KL that codes of one width for all entries have."""

CLIPS = {16: (1.0,), 8: (1.0,), 4: (1.0, 0.9, 0.8), 2: (1.0, 0.85, 0.75, 0.65, 0.55)}
"""Shares of the range that codes may cover."""


class Entries(NamedTuple):
    """Groups of entries as numbers: keys and values (lanes, groups, GROUP, dim), slots and marks (lanes, groups,
    GROUP), slots -1 for none."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    marks: Tensor

    @property
    def groups(self) -> int:
        """How many."""
        return self.slots.shape[1]


@dataclass(frozen=True)
class CodedValues:
    """Values of some lanes: codes (lanes, entries, dim packed), scale and offset (lanes, entries, 1); mean and
    deviation (lanes, 1, dim) of the channels."""

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    mean: Tensor
    deviation: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(lanes, 1, entries, dim), as if they were written out."""
        return self.codes.shape[0], 1, self.codes.shape[1], self.mean.shape[2]

    def mix(self, weights: Tensor) -> Tensor:
        """Return the sums weighted by ``weights`` (lanes, rows, entries): (lanes, rows, dim) float32."""
        mixed = multiplied(weights * self.scale.float().transpose(1, 2), self.codes, self.bits)
        mixed += weights @ self.offset.float()
        return mixed.mul_(self.deviation).add_(weights.sum(-1, keepdim=True) * self.mean)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Write them out: (lanes, entries, dim)."""
        numbers = torch.addcmul(self.offset.float(), unpack(self.codes, self.bits, torch.float32), self.scale.float())
        return numbers.mul_(self.deviation).add_(self.mean).to(dtype)


class Channels(NamedTuple):
    """Mean and deviation of the channels of values, (lanes, 1, value_dim) float32."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, entries: Entries) -> Channels:
        """Return those of some entries, empty places left out."""
        there = (entries.slots.flatten(1) >= 0)[..., None]
        number = there.sum(1, keepdim=True).clamp(min=1)
        values = entries.values.flatten(1, 2).float()
        mean = (values * there).sum(1, keepdim=True) / number
        deviation = (((values - mean) * there).square().sum(1, keepdim=True) / number).sqrt().clamp(min=1e-3)
        return cls(mean, torch.where(there.any(1, keepdim=True), deviation, 1.0))


class Rung:
    """Groups of one layer at ``bits``: parts (lanes, groups, ...). Where a model's numbers have as many bits, parts are
    these."""

    def __init__(self, bits: Bits, width: int) -> None:
        self.bits, self.plain = bits, bits.keys == 8 * width
        self.parts: list[Tensor] = []
        self.holes = False  # whether some slots are -1

    @property
    def groups(self) -> int:
        """Groups held."""
        return self.parts[0].shape[1] if self.parts else 0

    def settle(
        self, slots: Tensor, marks: Tensor, coming: Entries, count: int, channels: Channels, meter: Meter
    ) -> tuple[Tensor, Tensor, Entries]:
        """Keep the ``count`` most attended groups of those held, whose slots and marks (lanes, groups, GROUP) are
        given, and those ``coming``. Return the slots and marks of what is held now, and what falls."""
        held = self.groups
        if not held and not count:
            return slots, marks, coming
        own = self.encode(coming.keys, coming.values, channels)
        parts = [torch.cat(pair, 1) for pair in zip(self.parts, own, strict=True)] if held else own
        slots, marks = torch.cat([slots, coming.slots], 1), torch.cat([marks, coming.marks], 1)
        if slots.shape[1] <= count:
            self.parts = parts if held else [part.clone() for part in parts]  # may be part of something larger
            return slots, marks, Entries(*(part[:, :0] for part in coming))
        with meter.holding(*parts):
            order = marks.masked_fill(slots < 0, 0.0).sum(2).argsort(dim=1, descending=True, stable=True)
            falling, staying = order[:, count:], order[:, :count]
            keys, values = self._written(picked(parts, falling), channels, coming.keys.dtype)
            if coming.groups:  # what passes by falls from what it was
                new = (falling - held).clamp(min=0)
                passes = (falling >= held)[..., None, None]
                keys = torch.where(passes, picked([coming.keys], new)[0], keys)
                values = torch.where(passes, picked([coming.values], new)[0], values)
            left = Entries(keys, values, *picked([slots, marks], falling))
            self.parts = picked(parts, staying)
        return *picked([slots, marks], staying), left  # type: ignore[return-value]

    def encode(self, keys: Tensor, values: Tensor, channels: Channels) -> list[Tensor]:
        """Return the parts of groups of keys and values (lanes, groups, GROUP, dim)."""
        if self.plain:
            return [keys, values]
        even, bits = (values.float() - channels.mean[:, None]) / channels.deviation[:, None], self.bits
        return [
            *encode(keys.transpose(2, 3), bits.keys, CLIPS[bits.keys]),
            *encode(even, bits.values, CLIPS[bits.values]),
        ]

    def _written(self, parts: list[Tensor], channels: Channels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.plain:
            return parts[0], parts[1]
        keys, values = self._coded(parts, channels)
        return keys.dense(dtype).unflatten(1, (-1, GROUP)), values.dense(dtype).unflatten(1, (-1, GROUP))

    def read(self, channels: Channels) -> tuple[Any, Any]:
        """Return keys and values for attention, (lanes, 1, entries, dim) or coded."""
        if self.plain:
            keys, values = (part.flatten(1, 2)[:, None] for part in self.parts)
            return keys, values
        return self._coded(self.parts, channels)

    def _coded(self, parts: list[Tensor], channels: Channels) -> tuple[CodedKeys, CodedValues]:
        rows = (part.flatten(1, 2) for part in parts[3:])
        keys = CodedKeys(*parts[:3], self.bits.keys)  # type: ignore[call-arg, arg-type]
        return keys, CodedValues(*rows, self.bits.values, *channels)  # type: ignore[call-arg, arg-type]


class Ladder:
    """One layer's rungs, and the entries that wait to be a group. ``room``: bytes of a lane for groups; ``width``:
    bytes of a number of the model's. Slots and marks of everything lie in one tensor each, (lanes, entries), rung by
    rung; the last GROUP are of what waits."""

    def __init__(self, room: int, key_dim: int, value_dim: int, width: int, meter: Meter) -> None:
        self.meter = meter
        self.prices = [group_bytes(key_dim, value_dim, bits, width) for bits in RUNGS]
        self.room = room - channel_bytes(value_dim)
        self.rungs = [Rung(bits, width) for bits in RUNGS]
        self.waiting: list[Tensor] = []  # keys and values (lanes, GROUP, dim)
        self.slots: Tensor | None = None
        self.marks: Tensor | None = None
        self.count = 0  # of those that wait
        self.heads = 1  # lanes of a row
        self.channels: Channels | None = None

    def take(self, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor) -> None:
        """Take entries: (lanes, n, dim), slots and marks (lanes, n), -1 for none."""
        fresh = [keys, values, slots, marks]
        if self.slots is None or self.marks is None:
            size = keys.shape[0], GROUP
            self.waiting = [part.new_zeros(*size, part.shape[2], dtype=narrow(part.dtype)) for part in fresh[:2]]
            self.slots, self.marks = slots.new_full(size, -1), marks.new_zeros(size)
        waiting = [*self.waiting, self.slots[:, -GROUP:], self.marks[:, -GROUP:]]
        count = self.count + slots.shape[1]
        if count >= GROUP:
            fresh = [torch.cat([old[:, : self.count], new], 1) for old, new in zip(waiting, fresh, strict=True)]
            if count >= 2 * GROUP:  # those attended alike fall alike
                order = fresh[3].masked_fill(fresh[2] < 0, float("-inf")).argsort(dim=1, stable=True)
                fresh = picked(fresh, order)
            whole = count // GROUP * GROUP
            with self.meter.holding(*fresh[:2]):
                self._fall(Entries(*(part[:, :whole].unflatten(1, (-1, GROUP)) for part in fresh)))
            fresh, self.count, count = [part[:, whole:] for part in fresh], 0, count - whole
            waiting[2:] = self.slots[:, -GROUP:], self.marks[:, -GROUP:]
        for kept, new in zip(waiting, fresh, strict=True):
            kept[:, self.count : count] = new
        self.count = count

    def _fall(self, coming: Entries) -> None:
        assert self.slots is not None and self.marks is not None
        if self.channels is None:
            self.channels = Channels.of(coming)
        counts = self.counts(self.groups + coming.groups)
        room = start = 0  # of rungs above, where less is held than could be: what has fallen does not come up
        every: list[tuple[Tensor, Tensor]] = []
        for rung, count in zip(self.rungs, counts, strict=True):
            stop = start + rung.groups * GROUP
            slots, marks = (part[:, start:stop].unflatten(1, (-1, GROUP)) for part in (self.slots, self.marks))
            start, room = stop, room + count
            if coming.groups or rung.groups > room:
                slots, marks, coming = rung.settle(slots, marks, coming, room, self.channels, self.meter)
            every.append((slots.flatten(1), marks.flatten(1)))
            room -= rung.groups
        empty = torch.stack([(slots < 0).any() for slots, _ in every]).tolist()  # one question to the device for all
        for rung, holes in zip(self.rungs, empty, strict=True):
            rung.holes = holes
        every.append((self.slots[:, -GROUP:], self.marks[:, -GROUP:]))
        self.slots, self.marks = (torch.cat(parts, 1) for parts in zip(*every, strict=True))

    @property
    def groups(self) -> int:
        """Groups held."""
        return sum(rung.groups for rung in self.rungs)

    def counts(self, groups: int) -> list[int]:
        """Return how many of so many groups are on each rung: the deepest that there are bytes for."""
        low, high = 0.0, 1.0 + ABOVE[0]
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._bytes(middle, groups) <= self.room else (low, middle)
        return self._reach(low if self._bytes(high, groups) > self.room else high, groups)

    def _reach(self, depth: float, groups: int) -> list[int]:
        reach = [min(groups, max(0, int(groups * (depth - above) + 0.5))) for above in ABOVE]
        return [own - above for own, above in zip(reach, [0, *reach], strict=False)]

    def _bytes(self, depth: float, groups: int) -> int:
        return sum(count * price for count, price in zip(self._reach(depth, groups), self.prices, strict=True))

    def pieces(self) -> Iterator[tuple[Rung | None, Tensor]]:
        """Yield what holds entries, with a view of its slots (lanes, n): rungs, and None for what waits."""
        start = 0
        if self.slots is None:
            return
        for rung in self.rungs:
            if rung.groups:
                stop = start + rung.groups * GROUP
                yield rung, self.slots[:, start:stop]
                start = stop
        if self.count:
            yield None, self.slots[:, start : start + self.count]

    @property
    def used(self) -> int:
        """Entries of a lane that are held; the first of slots and marks are theirs."""
        return self.groups * GROUP + self.count

    def stores(self) -> dict[str, list[Tensor]]:
        """Return all tensors by the name of what holds them."""
        named = {str(number): rung.parts for number, rung in enumerate(self.rungs) if rung.groups}
        if self.slots is not None and self.marks is not None:
            named["counts"] = [torch.tensor([self.heads, self.count, *(rung.holes for rung in self.rungs)])]
            named["waiting"] = self.waiting
            named["places"] = [self.slots, self.marks]
        if self.channels is not None:
            named["channels"] = [*self.channels]
        return named

    def put(self, named: dict[str, list[Tensor]]) -> None:
        """Replace all tensors, as :meth:`stores` gave them."""
        for number, rung in enumerate(self.rungs):
            rung.parts = named.get(str(number), rung.parts)
        if "places" in named:
            self.waiting = named["waiting"]
            self.slots, self.marks = named["places"]
        if "counts" in named:
            self.heads, self.count, *holes = named["counts"][0].tolist()
            for rung, flag in zip(self.rungs, holes, strict=True):
                rung.holes = bool(flag)
        if "channels" in named:
            self.channels = Channels(*named["channels"])

    def truncate(self, length: int) -> None:
        """Leave holes where slots are forgotten."""
        if self.slots is not None:
            for rung in self.rungs:
                rung.holes = True
            self.slots.masked_fill_(self.slots >= length, -1)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""

        def rows(tensor: Tensor) -> Tensor:
            return tensor.unflatten(0, (-1, self.heads)).index_select(0, index.to(tensor.device)).flatten(0, 1)

        stores = self.stores()
        stores.pop("counts", None)
        self.put({name: [rows(tensor) for tensor in tensors] for name, tensors in stores.items()})

    @property
    def nbytes(self) -> int:
        """Bytes allocated for entries."""
        channels = () if self.channels is None else self.channels
        return sum(nbytes(*rung.parts) for rung in self.rungs) + nbytes(*channels, *self.waiting)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots and marks."""
        return nbytes(self.slots, self.marks)


def group_bytes(key_dim: int, value_dim: int, bits: Bits, width: int) -> int:
    """Return the bytes of one group of one lane of a model whose numbers have ``width`` bytes."""
    if bits.keys == 8 * width:
        return width * GROUP * (key_dim + value_dim)
    return key_dim * (GROUP * bits.keys // 8 + 4) + GROUP * (value_dim * bits.values // 8 + 4)


def channel_bytes(value_dim: int) -> int:
    """Return the bytes of what one lane's channels are brought to."""
    return 8 * value_dim


def narrow(dtype: torch.dtype) -> torch.dtype:
    """Return what numbers of ``dtype`` wait as: half precision, or as they are where they have 16 bits."""
    return torch.float16 if dtype.itemsize > 2 else dtype


def picked(tensors: list[Tensor], index: Tensor) -> list[Tensor]:
    """Gather ``index`` (lanes, n) along the second axis of each."""
    return [
        one.gather(1, index.view(*index.shape, *[1] * (one.ndim - 2)).expand(-1, -1, *one.shape[2:])) for one in tensors
    ]
