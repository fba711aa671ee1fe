"""``quantize``: evicted entries are kept in few bits (KIVI, arXiv:2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.contracts.part import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.meter import Meter
from kvkeep.policies.fates.base import GroupedFate, exact_entries
from kvkeep.stores.evicted.coded import CodedKeys, CodedValues, encode_keys, encode_values, group_bytes, width
from kvkeep.stores.evicted.group_banks import GroupBanks
from kvkeep.stores.evicted.groups import Codec, FewBits


@dataclass(frozen=True)
class Quantize(GroupedFate):
    """Evicted entries are kept at ``bits`` bits, in the part of the budget that exact entries leave. When it is full,
    the entries evicted first are dropped; after a second reading, first the group whose best score is the lowest."""

    bits: int = 4
    """8, 4 or 2."""
    exact: float = 0
    """The share of the budget for exact entries, at least one, or (from 1 on) their number, at most half of the budget.
    0: half of the budget; a tenth of it where the text is read a second time."""

    label: ClassVar[str] = "quantised"
    source: ClassVar[str] = "KIVI, arXiv:2402.02750"
    returns: ClassVar[str] = "approximately, from its codes"

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise UsageError(f"Entries are kept at 8, 4 or 2 bits, not {self.bits}.")

    def after_second_reading(self) -> Quantize:
        return self if self.exact else replace(self, exact=0.1)

    def resident(self, entries: int) -> int:
        return exact_entries(self.exact or 0.5, entries)

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        for layer in geometry.full_layers:
            if layer.key_dim % (8 // self.bits) or width(layer.value_dim) % (8 // self.bits):
                raise UnsupportedModelError(
                    f"Heads of '{geometry.model_type}' are {layer.value_dim} wide, which does not divide into "
                    f"bytes at {self.bits} bits; use 8."
                )
        super().fits(name, geometry, entries)

    def size(self, layer: LayerGeometry, geometry: ModelGeometry) -> int:
        return group_bytes(layer.key_dim, layer.value_dim, self.bits)

    def codec(self, site: Site) -> Codec:
        return Quantised(self.bits, site.meter)

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return GroupBanks(self._groups(site.layer, site.geometry, site.entries), self.codec(site), site.device)

    def written(self, layer: LayerGeometry, geometry: ModelGeometry) -> int:
        return 4 * max(layer.key_dim, layer.value_dim)


@dataclass(frozen=True)
class Quantised(FewBits):
    """Codes with a scale and an offset."""

    bits: int
    meter: Meter

    def encode(self, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        return [*encode_keys(keys, self.bits), *encode_values(values, self.bits)]

    def coded(self, parts: list[Tensor]) -> tuple[CodedKeys, CodedValues]:
        return CodedKeys(*parts[:3], self.bits), CodedValues(*parts[3:], self.bits)  # type: ignore[call-arg, arg-type]
