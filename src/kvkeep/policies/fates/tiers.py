"""``tiers``: evicted entries are kept in precision tiers; those with less attention get fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UnsupportedModelError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.fates.base import exact_entries, spare
from kvkeep.stores.evicted.tier_sizes import TIERS, channel_bytes, group_bytes, tiers_hold, waiting_bytes
from kvkeep.stores.evicted.tiers import Tiers


@dataclass(frozen=True)
class InTiers(Fate):
    """Evicted entries are kept at 16 bits (in a float32 cache), 8 or 4, or 4 for keys and 2 for values. They use the
    part of the budget that exact entries leave. As the text grows, the groups of 32 with the least attention move down
    a tier; from the last tier they are dropped. A group that receives attention again stays in its tier. Entries that
    wait for a full group have half of the model's bits."""

    exact: float = 8
    """The share of the budget for exact entries, at least one, or (from 1 on) their number, at most a quarter of the
    budget."""

    label: ClassVar[str] = "quantised by attention"
    source: ClassVar[str] = "kvkeep; codes after arXiv:2402.02750"
    returns: ClassVar[str] = "approximately, from its codes"

    def resident(self, entries: int) -> int:
        """Return the number of exact entries, without those of the incomplete group."""
        return min(exact_entries(self.exact, entries), entries // 4)

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        super().fits(name, geometry, entries)
        bits = TIERS[-1].values
        for layer in geometry.full_layers:
            if layer.value_dim % (8 // bits):
                raise UnsupportedModelError(
                    f"Heads of '{geometry.model_type}' are {layer.value_dim} wide, which does not divide into "
                    f"bytes at {bits} bits; use quantize:8."
                )
            self._tier_bytes(layer, geometry, entries)

    def _tier_bytes(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
        least = channel_bytes(layer.value_dim) + group_bytes(layer.key_dim, layer.value_dim, TIERS[-1])
        waiting = waiting_bytes(geometry.dtype_bytes)
        return spare(self, layer, geometry, entries, least, waiting)

    def store(self, site: Site, shared: Any) -> EvictedStore:
        layer, geometry = site.layer, site.geometry
        nbytes = self._tier_bytes(layer, geometry, site.entries)
        return Tiers(nbytes, layer.key_dim, layer.value_dim, geometry.dtype_bytes, site.meter)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        nbytes = self._tier_bytes(layer, geometry, entries)
        return tiers_hold(nbytes, layer, geometry.dtype_bytes, left)
