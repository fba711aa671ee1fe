"""``tiers``: what leaves is kept in fewer and fewer bits, the less attention it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.fate import Fate
from kvkeep.contracts.site import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UnsupportedModelError, unknown
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.fates.base import exact_entries, spare
from kvkeep.stores.evicted.tier_sizes import TIERS, channel_bytes, group_bytes, tiers_hold
from kvkeep.stores.evicted.tiers import PARTS, Tiers
from kvkeep.stores.evicted.waiting import waiting_bytes


@dataclass(frozen=True)
class InTiers(Fate):
    """Entries that leave are kept at 16 bits (of a float32 cache), 8 or 4, or 4 for keys and 2 for values, in what the
    budget's exact entries leave over. As the text grows, groups of 32 that get least attention fall a tier, and from
    the last one they are gone; attention that returns to a group keeps it where it is. What waits to be a group has
    half of its bits. ``exact``: as for 'quantize', but a quarter of the budget at most. ``without``: a part to leave
    out, to see what it is good for: 'attention' (groups fall by age), 'channels' (values are not
    normalised by channel) or 'waiting' (what waits to be a group has 16 bits)."""

    exact: float = 8
    without: str = ""

    label: ClassVar[str] = "quantised by attention"
    source: ClassVar[str] = "kvkeep; codes after arXiv:2402.02750"
    returns: ClassVar[str] = "approximately, from its codes"

    def __post_init__(self) -> None:
        if self.without and self.without not in PARTS:
            raise unknown("part of tiers", self.without, PARTS)

    def resident(self, entries: int) -> int:
        """Return the exact ones, a quarter of the budget at most; the group that waits comes on top."""
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
            self._room(layer, geometry, entries)

    def _room(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
        least = channel_bytes(layer.value_dim) + group_bytes(layer.key_dim, layer.value_dim, TIERS[-1])
        waiting = waiting_bytes(geometry.dtype_bytes, self.without != "waiting")
        return spare(self, layer, geometry, entries, least, waiting)

    def store(self, site: Site, shared: Any) -> EvictedStore:
        layer, geometry = site.layer, site.geometry
        room = self._room(layer, geometry, site.entries)
        return Tiers(room, layer.key_dim, layer.value_dim, geometry.dtype_bytes, site.meter, self.without)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        room = self._room(layer, geometry, entries)
        return tiers_hold(room, layer, geometry.dtype_bytes, left, self.without)
