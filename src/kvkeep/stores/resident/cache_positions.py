"""Positions within the cache: a stream can then be longer than the positions a model was trained for.

StreamingLLM (arXiv:2309.17453, section 3.2) uses an entry's place in the cache as its position. Rotary attention
depends on differences of positions only. So each step rotates only the few sinks: they follow the window, ``gap``
places after their positions in the text. The model gets all positions relative to ``base``. When they reach the
model's last one, ``base`` grows, and the entries are rotated back once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.memory.extent import ShapeError, within
from kvkeep.memory.meter import storage_bytes
from kvkeep.models.adapter import Adapter
from kvkeep.stores.layer import Layer
from kvkeep.stores.resident.banks import Bank


class CachePositions:
    """Gives the entries of a cache positions below ``limit``. The cache has ``entries`` entries; the first ``sinks``
    are fixed."""

    def __init__(self, adapter: Adapter, sinks: int, entries: int, limit: int) -> None:
        self.adapter, self.sinks, self.entries, self.limit = adapter, sinks, entries, limit
        self.base = 0  # subtracted from every position
        self.gap = torch.zeros(1, dtype=torch.long)  # (rows or 1,): evicted entries between the sinks and the rest
        self._next = self.gap
        self._turned = self.gap > 0  # (rows or 1,): rows with rotated sinks, whose original keys are kept
        self._before = self._turned  # value before this step
        self._placed: set[int] = set()  # layers processed in this step
        self._bases: dict[int, int] = {}  # base of the rotation of each layer's entries
        self._angles: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # angles of this step, by layer type and bank
        self._moved = False

    def begin(self, ordinals: Tensor, length: int) -> Tensor:
        """Return the positions that the model gets instead of ``ordinals`` (batch or 1, new), the numbers of each row's
        tokens from 0.

        length: slots before these.
        """
        count = ordinals.shape[1]
        if length + count - self.base > self.limit:
            self.base = length - self.entries
        current = self._next.to(ordinals.device)
        later = torch.maximum(current, ordinals[:, -1] + 1 - self.entries)
        self._next = _kept(current, later) if count == 1 else later
        # A single token evicts before it is attended, a chunk afterwards.
        self.gap = self._next if count == 1 else current
        if not self._moved and length + (count == 1) > self.entries:
            self._moved = bool((self.gap > 0).any())  # slots may be padding
        turned = self._turned.to(ordinals.device)
        self._before = turned if turned.device.type == "cpu" else turned.clone()
        self._turned = _kept(turned, turned | (self.gap > 0))
        self._placed.clear()
        self._angles.clear()
        return ordinals - self.base

    def layout(self, length: int) -> Sequence[Any] | None:
        """Return what decides a step of one token after ``length`` slots, as
        :meth:`~kvkeep.contracts.resident.Resident.layout` does; None where the step changes it."""
        if not self._moved or length + 1 - self.base > self.limit:
            return None
        return [self.base, *self._bases.values(), self._next, self._turned]

    def place(self, layer: Layer) -> None:
        """Rotate the keys of ``layer`` to the positions of this step."""
        if self._moved and layer.index not in self._placed:
            self._placed.add(layer.index)
            for bank in layer.resident.banks:
                self._keep(layer, bank)
        if (lag := self.base - self._bases.get(layer.index, 0)) > 0:
            self._bases[layer.index] = self.base
            for bank in layer.resident.banks:
                rest = bank.keys[:, None, self.sinks : bank.used]
                by = torch.full(rest.shape[1:3], -lag, device=rest.device)
                rest.copy_(self.adapter.turn(layer.index, rest, self.adapter.angles(layer.index, rest, by)))
        if not self._moved:
            return
        for number, bank in enumerate(layer.resident.banks):
            angles = self._of(layer, number)
            bank.keys[:, : self.sinks] = self.adapter.turn(layer.index, bank.sinks[:, None], angles)[:, 0]

    def _keep(self, layer: Layer, bank: Bank) -> None:
        """Copy the sinks of a bank before rotation, for lanes whose sinks have not been rotated: some may have arrived
        since the last copy."""
        came = bank.keys[:, None, : self.sinks]
        if base := self._bases.get(layer.index, 0):
            by = torch.full(came.shape[1:3], base, device=came.device)
            came = self.adapter.turn(layer.index, came, self.adapter.angles(layer.index, came, by))
        if bank.sinks is None:
            bank.sinks = came[:, 0].clone()
        else:
            turned = _by_lane(layer, bank, self._before)
            bank.sinks = _kept(bank.sinks, torch.where(turned[:, None, None], bank.sinks, came[:, 0]))

    def _of(self, layer: Layer, number: int) -> tuple[Tensor, Tensor]:
        """Return the angles that rotate a bank's sinks to the window; layers of one type share them."""
        key = self.adapter.layer_type(layer.index), number
        if key not in self._angles:
            bank = layer.resident.banks.banks[number]
            by = _by_lane(layer, bank, self.gap - self.base)
            self._angles[key] = self.adapter.angles(layer.index, bank.keys, by[:, None].expand(-1, self.sinks))
        return self._angles[key]

    @property
    def nbytes(self) -> int:
        flags = self._turned, self._before
        return storage_bytes(self._next, self.gap, *flags, *(one for angles in self._angles.values() for one in angles))

    def select(self, index: Tensor) -> None:
        for name in ("_next", "gap", "_turned"):  # some may have one row for all
            if len(rows := getattr(self, name)) > 1:
                setattr(self, name, rows[index.to(rows.device)])

    def state(self) -> Tensor:
        """Return the state to save: the base, whether anything moved, bases by layer, and for every row the gap and
        whether its sinks were rotated."""
        bases = [number for layer in sorted(self._bases.items()) for number in layer]
        turned = self._turned.expand(len(self._next)).tolist()
        return torch.tensor([self.base, self._moved, len(bases), *bases, *self._next.tolist(), *turned])

    def restore(self, state: Tensor) -> None:
        self.base, moved, count, *rest = state.tolist()
        self._moved, bases = bool(moved), rest[:count]
        self._bases = dict(zip(bases[::2], bases[1::2], strict=True))
        self._next, turned = torch.tensor(rest[count:]).chunk(2)
        self.gap = self._next
        self._turned = self._before = turned.bool()

    def check(self, rows: int, length: int, layers: int) -> None:
        within("the base of positions", self.base, 0, length + 1)
        for layer, base in self._bases.items():
            within("a layer's number", layer, 0, layers)
            within("a layer's base", base, 0, self.base + 1)
        within("the gap behind the sinks", self._next, 0, length + 1)
        if len(self._next) not in (1, rows) or len(self._turned) not in (1, rows) or length - self.base > self.limit:
            raise ShapeError("the gap behind the sinks is not that of all rows")

    def check_cut(self, length: int) -> None:
        """Raise UsageError if a cut to ``length`` tokens would remove sinks that have moved already."""
        if self._moved and length < self.sinks:
            raise UsageError(
                "This cache gives its entries new positions as the text grows, so tokens cannot be removed from "
                "the end; call reset()."
            )

    def truncate(self, length: int) -> None:
        self._next = self._next.clamp(max=max(0, length - self.sinks))


def _kept(old: Tensor, new: Tensor) -> Tensor:
    """Return ``new``, on a GPU in the memory of ``old``, where a graph of CUDA finds it."""
    return new if new.device.type == "cpu" or old.shape != new.shape else old.copy_(new)


def _by_lane(layer: Layer, bank: Bank, rows: Tensor) -> Tensor:
    """Return a bank's part of ``rows``, a tensor by row, or (1,) for all rows."""
    return rows if len(rows) == 1 else bank.of(rows.repeat_interleave(layer.heads))
