"""Entries that left, on a ladder: 16 bits, 8, 4, 2, gone. As more come, the least attended fall a rung.

Entries come in groups of 32, and a group falls as a whole: keys have a scale for each channel and group (KIVI,
arXiv:2402.02750), which is far better than one for each entry, values one for each entry, of channels brought to mean 0
and deviation 1. The bounds of a code may lie within those of the numbers where that is nearer to them (clipping). Half
precision keeps what numbers of 32 bits differ from their channel's mean by: keys lie far from 0, and near each other.

**How many groups a rung holds** follows from how many there are and from the bytes alone, so all KV heads have the same
tensors; which groups these are is each head's own. If attention by rank falls like 1/rank, the sum of squared errors
within given bytes is smallest where the rungs reach down to fixed shares of a common depth: :data:`SHARES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.stores.coded import CodedKeys, encode, multiplied, unpack
from kvkeep.stores.groups import GROUP
from kvkeep.stores.meter import Meter, nbytes

RUNGS = (16, 8, 4, 2)
"""Bits of the rungs. The first is the model's own numbers where these have 16 bits, and half precision otherwise."""

SHARES = (1 / 256, 1 / 16, 5 / 12, 1.0)
"""How far down each rung reaches, as a share of the depth at which entries are gone. An entry is worth a rung while its
squared share of the attention times the squared error that is spared exceeds a price in bytes. So the shares at which
rungs end are to each other as sqrt(bytes / error spared): about 360, 16 and 3 to 1 by the errors that codes of a real
model's keys and values have. 5/12 did better than 1/3."""

CLIPS = {8: (1.0,), 4: (1.0, 0.9, 0.8), 2: (1.0, 0.85, 0.75, 0.65, 0.55)}
"""Shares of the range that codes may cover."""


@dataclass
class Entries:
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

    def tensors(self) -> list[Tensor]:
        """Return all there is."""
        return [self.keys, self.values, self.slots, self.marks]


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


@dataclass(frozen=True)
class Channels:
    """What numbers are brought nearer to 0 by before they are coded: means of keys (lanes, 1, key_dim), means and
    deviations of values (lanes, 1, value_dim), float32."""

    keys: Tensor
    values: Tensor
    deviation: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all there is."""
        return [self.keys, self.values, self.deviation]

    @classmethod
    def of(cls, entries: Entries) -> Channels:
        """Return those of some entries, empty places left out."""
        there = (entries.slots.flatten(1) >= 0)[..., None]
        number = there.sum(1, keepdim=True).clamp(min=1)
        keys, values = (rows.flatten(1, 2).float() for rows in (entries.keys, entries.values))
        mean, middle = ((rows * there).sum(1, keepdim=True) / number for rows in (values, keys))
        deviation = (((values - mean) * there).square().sum(1, keepdim=True) / number).sqrt().clamp(min=1e-3)
        return cls(middle, mean, torch.where(there.any(1, keepdim=True), deviation, 1.0))


class Rung:
    """The groups that one layer holds at ``bits`` bits: parts, slots and marks of (lanes, groups, ...) each."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.parts: list[Tensor] = []
        self.slots: Tensor | None = None
        self.marks: Tensor | None = None

    @property
    def groups(self) -> int:
        """Groups held."""
        return 0 if self.slots is None else self.slots.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return all there is."""
        return [] if self.slots is None or self.marks is None else [*self.parts, self.slots, self.marks]

    def hold(self, tensors: list[Tensor]) -> None:
        """Replace everything."""
        *self.parts, self.slots, self.marks = tensors

    def settle(self, coming: Entries, count: int, channels: Channels, meter: Meter) -> Entries:
        """Keep the ``count`` most attended groups of those held and those ``coming``; return the others."""
        held, total = self.groups, self.groups + coming.groups
        if not held and not count:
            return coming
        own = [*self.encode(coming.keys, coming.values, channels), coming.slots, coming.marks]
        if held:
            own = [torch.cat(pair, 1) for pair in zip(self.tensors(), own, strict=True)]
        if total <= count:
            self.hold(own if held else [part.clone() for part in own])  # what is coming is part of something larger
            return Entries(*(part[:, :0] for part in coming.tensors()))
        with meter.holding(*own):
            order = own[-1].masked_fill(own[-2] < 0, 0.0).sum(2).argsort(dim=1, descending=True, stable=True)
            falling = order[:, count:]
            keys, values = self._written(picked(own, falling), channels, coming.keys.dtype)
            if coming.groups:  # what passes by falls from what it was
                new = (falling - held).clamp(min=0)
                passes = (falling >= held)[..., None, None]
                keys = torch.where(passes, picked([coming.keys], new)[0], keys)
                values = torch.where(passes, picked([coming.values], new)[0], values)
            left = Entries(keys, values, *picked(own[-2:], falling))
            self.hold(picked(own, order[:, :count]))
        return left

    def encode(self, keys: Tensor, values: Tensor, channels: Channels) -> list[Tensor]:
        """Return the parts of groups of keys and values (lanes, groups, GROUP, dim)."""
        if self.bits == 16 and keys.dtype.itemsize == 2:
            return [keys, values]
        even = values.float() - channels.values[:, None]
        if self.bits == 16:
            return [(keys - channels.keys[:, None]).half(), even.half()]
        even, clips = even / channels.deviation[:, None], CLIPS[self.bits]
        return [*encode(keys.transpose(2, 3), self.bits, clips), *encode(even, self.bits, clips)]

    def _written(self, parts: list[Tensor], channels: Channels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = self._read(parts, channels, dtype)
        if self.bits != 16:
            keys, values = keys.dense(dtype), values.dense(dtype)
        return keys.reshape(*parts[-1].shape, -1), values.reshape(*parts[-1].shape, -1)

    def read(self, channels: Channels, dtype: torch.dtype) -> tuple[Any, Any]:
        """Return keys and values for attention, (lanes, 1, entries, dim) or coded."""
        return self._read(self.tensors(), channels, dtype)

    def _read(self, parts: list[Tensor], channels: Channels, dtype: torch.dtype) -> tuple[Any, Any]:
        if self.bits == 16:
            keys, values = (part.flatten(1, 2) for part in parts[:2])
            if dtype.itemsize != 2:
                keys, values = channels.keys + keys, channels.values + values
            return keys[:, None], values[:, None]
        rows = (part.flatten(1, 2) for part in parts[3:6])
        return CodedKeys(*parts[:3], self.bits), CodedValues(*rows, self.bits, channels.values, channels.deviation)  # type: ignore[call-arg, arg-type]


class Ladder:
    """One layer's rungs, and the entries that wait to be a group. ``room``: bytes of a lane for groups."""

    def __init__(self, room: int, key_dim: int, value_dim: int, meter: Meter) -> None:
        self.meter = meter
        self.prices = [group_bytes(key_dim, value_dim, bits) for bits in RUNGS]
        self.room = room - 4 * (key_dim + 2 * value_dim)  # channels
        self.rungs = [Rung(bits) for bits in RUNGS]
        self.waiting: Entries | None = None  # one group
        self.count = 0  # of its entries
        self.heads = 1  # lanes of a row
        self.channels: Channels | None = None
        self.holes = False  # whether some slots are -1

    def take(self, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor) -> None:
        """Take entries: (lanes, n, dim), slots and marks (lanes, n), -1 for none."""
        fresh = [keys, values, slots, marks]
        if self.waiting is None:
            self.waiting = Entries(*(part.new_zeros(part.shape[0], 1, GROUP, *part.shape[2:]) for part in fresh))
        waiting = [part[:, 0] for part in self.waiting.tensors()]
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
        for kept, new in zip(waiting, fresh, strict=True):
            kept[:, self.count : count] = new
        self.count = count

    def _fall(self, coming: Entries) -> None:
        if self.channels is None:
            self.channels = Channels.of(coming)
        self.holes = self.holes or bool((coming.slots < 0).any())
        room = 0  # of rungs above, where less is held than could be: what has fallen does not come up
        for rung, count in zip(self.rungs, self.counts(coming.groups + self.groups), strict=True):
            room += count
            if coming.groups or rung.groups > room:
                coming = rung.settle(coming, room, self.channels, self.meter)
            room -= rung.groups

    @property
    def groups(self) -> int:
        """Groups held."""
        return sum(rung.groups for rung in self.rungs)

    def counts(self, groups: int) -> list[int]:
        """Return how many of so many groups are on each rung: the deepest that there are bytes for."""
        low, high = 0.0, groups / SHARES[0]
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._bytes(middle, groups) <= self.room else (low, middle)
        return self._reach(low if self._bytes(high, groups) > self.room else high, groups)

    def _reach(self, depth: float, groups: int) -> list[int]:
        reach = [min(groups, int(depth * share + 0.5)) for share in SHARES]
        return [own - above for own, above in zip(reach, [0, *reach], strict=False)]

    def _bytes(self, depth: float, groups: int) -> int:
        return sum(count * price for count, price in zip(self._reach(depth, groups), self.prices, strict=True))

    def pieces(self) -> list[tuple[Rung | None, Tensor, Tensor]]:
        """Return what holds entries, with views of its slots and marks (lanes, n): rungs, and None for what waits."""
        held: list[tuple[Rung | None, Tensor, Tensor]] = [
            (rung, rung.slots.flatten(1), rung.marks.flatten(1))
            for rung in self.rungs
            if rung.slots is not None and rung.marks is not None and rung.groups
        ]
        if self.waiting is not None and self.count:
            held.append((None, self.waiting.slots[:, 0, : self.count], self.waiting.marks[:, 0, : self.count]))
        return held

    def stores(self) -> dict[str, list[Tensor]]:
        """Return all tensors by the name of what holds them."""
        named = {str(rung.bits): rung.tensors() for rung in self.rungs if rung.groups}
        if self.waiting is not None:
            named["counts"] = [torch.tensor([self.heads, self.count, self.holes])]
            named["waiting"] = self.waiting.tensors()
        if self.channels is not None:
            named["channels"] = self.channels.tensors()
        return named

    def put(self, named: dict[str, list[Tensor]]) -> None:
        """Replace all tensors, as :meth:`stores` gave them."""
        for rung in self.rungs:
            if str(rung.bits) in named:
                rung.hold(named[str(rung.bits)])
        if "waiting" in named:
            self.waiting = Entries(*named["waiting"])
        if "counts" in named:
            self.heads, self.count, holes = named["counts"][0].tolist()
            self.holes = bool(holes)
        if "channels" in named:
            self.channels = Channels(*named["channels"])

    def truncate(self, length: int) -> None:
        """Leave holes where slots are forgotten."""
        for _, slots, _ in self.pieces():
            self.holes = True
            slots.masked_fill_(slots >= length, -1)

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
        held = sum(nbytes(*rung.parts) for rung in self.rungs)
        held += 0 if self.channels is None else nbytes(*self.channels.tensors())
        return held + (0 if self.waiting is None else nbytes(self.waiting.keys, self.waiting.values))

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots and marks."""
        held = sum(nbytes(rung.slots, rung.marks) for rung in self.rungs)
        return held + (0 if self.waiting is None else nbytes(self.waiting.slots, self.waiting.marks))


def group_bytes(key_dim: int, value_dim: int, bits: int) -> int:
    """Return the bytes of one group of one lane."""
    if bits == 16:
        return 2 * GROUP * (key_dim + value_dim)
    return key_dim * (GROUP * bits // 8 + 4) + GROUP * (value_dim * bits // 8 + 4)


def picked(tensors: list[Tensor], index: Tensor) -> list[Tensor]:
    """Gather ``index`` (lanes, n) along the second axis of each."""
    return [
        one.gather(1, index.view(*index.shape, *[1] * (one.ndim - 2)).expand(-1, -1, *one.shape[2:])) for one in tensors
    ]
