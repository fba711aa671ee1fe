"""``quantize``: what leaves is kept in few bits (KIVI, arXiv:2402.02750)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.fates.base import Fate, exact_entries, rooms
from kvkeep.policies.fates.grouped import GroupedFate
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.coded import CodedKeys, CodedValues, encode_keys, encode_values, group_bytes, width
from kvkeep.stores.groups import GROUP, Groups
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


@dataclass(frozen=True)
class Quantised(Fate):
    """Entries that leave are kept at ``bits`` bits, in what the budget's exact entries leave over; once that is full
    too, those that left first are dropped. ``exact``: the share of the budget that is for exact entries, or (from 1 on)
    their number, of which the budget allows half at most."""

    bits: int = 4
    exact: float = 0.5

    label: ClassVar[str] = "quantised"
    recall: ClassVar[str] = "approximately, from its codes"
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise UsageError(f"Entries are kept at 8, 4 or 2 bits, not {self.bits}.")

    def resident(self, geometry: ModelGeometry, entries: int) -> int:
        """Return the exact ones; the group that waits for its last entry comes on top."""
        return exact_entries(self.exact, entries)

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return a store for as many groups as the budget has room for."""

        def size(layer: LayerGeometry) -> int:
            if layer.key_dim % (8 // self.bits) or width(layer.value_dim) % (8 // self.bits):
                raise UnsupportedModelError(
                    f"Heads of '{request.geometry.model_type}' are {layer.value_dim} wide, which does not divide into "
                    f"bytes at {self.bits} bits; use 8."
                )
            return group_bytes(layer.key_dim, layer.value_dim, self.bits)

        return _Quantised(self.bits, rooms(request, self, size), meter)


class _Quantised(GroupedFate):
    def __init__(self, bits: int, room: dict[int, int], meter: Meter) -> None:
        super().__init__(Whereabouts.QUANTISED, room)
        self.bits, self.meter = bits, meter

    def encode(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        return [*encode_keys(keys, self.bits), *encode_values(values, self.bits)]

    def read(self, layer: SelectedLayer, query: Tensor, groups: Groups) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        parts, slots = groups.by_lane()
        keys, values = CodedKeys(*parts[:3], self.bits), CodedValues(*parts[3:], self.bits)  # type: ignore[call-arg, arg-type]
        # What attention writes out of them for a moment: codes as numbers.
        size = 4 * GROUP * groups.held * keys.shape[0] * max(keys.shape[3], values.shape[3])
        self.meter.hold(size)
        yield slots.flatten(1), groups.holes, keys, values
        self.meter.hold(-size)
