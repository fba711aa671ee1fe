"""What fates have in common that keep entries in a smaller form, within what the budget's exact entries leave over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Any

from kvkeep.contracts.fate import Fate
from kvkeep.contracts.site import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.stores.evicted.groups import GROUP, Codec, Groups, group_holds


def exact_entries(exact: float, entries: int) -> int:
    """Return how many of a budget's ``entries`` stay as they are: a share of them, or (from 1 on) a number, of which
    half the budget is allowed."""
    if exact <= 0:
        raise UsageError(f"Some entries stay exact: a share of the budget, or their number, not {exact:g}.")
    return min(int(exact), entries // 2) if exact >= 1 else int(entries * exact)


def spare(
    fate: Fate, layer: LayerGeometry, geometry: ModelGeometry, entries: int, size: int, waiting: int | None = None
) -> int:
    """Return the bytes of a KV head that its exact entries and the group that waits leave over, within ``entries``;
    what waits takes ``waiting`` bytes a channel (None: 32 numbers of the model's own). Raises BudgetError where these
    are no group of ``size`` bytes."""
    numbers, number = layer.key_dim + layer.value_dim, geometry.dtype_bytes

    def room(entries: int) -> int:
        return numbers * ((entries - fate.resident(entries)) * number - (waiting or GROUP * number))

    if room(entries) < size:
        least = next(n for n in count(entries + 1) if room(n) >= size)
        raise BudgetError(
            f"A budget of {entries} entries has no room for {GROUP} that are {fate.label} beside the exact ones; "
            f"give it at least {least}."
        )
    return room(entries)


class GroupedFate(Fate):
    """Evicted entries are encoded by groups of 32, as many as have room beside the exact ones; the oldest make way.
    exact: a parameter, the share of the budget that is for exact entries, or (from 1 on) their number."""

    exact: float

    @abstractmethod
    def size(self, layer: LayerGeometry, geometry: ModelGeometry) -> int:
        """Return the bytes of a group of one KV head."""

    @abstractmethod
    def codec(self, site: Site) -> Codec:
        """Return how a layer's groups are encoded and read."""

    def written(self, layer: LayerGeometry, geometry: ModelGeometry) -> int:
        """Return the bytes that reading an entry of a KV head takes for a moment: by default those of the entry."""
        return (layer.key_dim + layer.value_dim) * geometry.dtype_bytes

    def resident(self, entries: int) -> int:
        """Return the exact ones; the group that waits for its last entry comes on top."""
        return exact_entries(self.exact, entries)

    def _room(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
        size = self.size(layer, geometry)
        return spare(self, layer, geometry, entries, size) // size

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        super().fits(name, geometry, entries)
        for layer in geometry.full_layers:
            self._room(layer, geometry, entries)

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return Groups(self._room(site.layer, site.geometry, site.entries), self.codec(site))

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        room, size = self._room(layer, geometry, entries), self.size(layer, geometry)
        return group_holds(layer, geometry, room, left, size, self.written(layer, geometry))
