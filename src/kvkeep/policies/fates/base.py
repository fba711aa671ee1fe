"""Fates that keep entries in a smaller form, in the part of the budget that exact entries do not use."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.stores.evicted.groups import GROUP, Codec, NewestGroups, group_holds


def exact_entries(exact: float, entries: int) -> int:
    """Return the exact entries of a budget of ``entries``: a share of it (at least 1), or, from 1 on, a number, at most
    half of the budget."""
    if exact <= 0:
        raise UsageError(f"The parameter 'exact' is a share of the budget or a number of entries, not {exact:g}.")
    return min(int(exact), entries // 2) if exact >= 1 else max(1, int(entries * exact))


def spare(
    fate: Fate, layer: LayerGeometry, geometry: ModelGeometry, entries: int, size: int, waiting: int | None = None
) -> int:
    """Return the bytes of a KV head within ``entries`` that its exact entries and the waiting group leave free. The
    waiting group takes ``waiting`` bytes a channel (None: 32 numbers of the model's dtype). Raises BudgetError where
    the free bytes are fewer than ``size``, the bytes of a group."""
    numbers, number = layer.key_dim + layer.value_dim, geometry.dtype_bytes

    def unused(entries: int) -> int:
        return numbers * ((entries - fate.resident(entries)) * number - (waiting or GROUP * number))

    if unused(entries) < size:
        enough = 2 * entries + 2  # doubled: free bytes never become fewer
        while unused(enough) < size:
            enough *= 2
        least = bisect_left(range(enough), True, lo=entries, key=lambda budget: unused(budget) >= size)
        raise BudgetError(
            f"A budget of {entries} entries is too small for exact entries and a group of {GROUP} that are "
            f"{fate.label}; give at least {least}."
        )
    return unused(entries)


class GroupedFate(Fate):
    """Evicted entries are encoded in groups of 32, in the memory that exact entries leave. When it is full, a new group
    replaces the oldest."""

    exact: float
    """A parameter: the share of the budget for exact entries, at least one of them, or (from 1 on) their number."""

    @abstractmethod
    def size(self, layer: LayerGeometry, geometry: ModelGeometry) -> int:
        """Return the bytes of a group of one KV head."""

    @abstractmethod
    def codec(self, site: Site) -> Codec:
        """Return the codec of a layer's groups."""

    def written(self, layer: LayerGeometry, geometry: ModelGeometry) -> int:
        """Return the temporary bytes for reading an entry of a KV head: by default those of the entry."""
        return (layer.key_dim + layer.value_dim) * geometry.dtype_bytes

    def resident(self, entries: int) -> int:
        """Return the number of exact entries, without those of the incomplete group."""
        return exact_entries(self.exact, entries)

    def _groups(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
        size = self.size(layer, geometry)
        return spare(self, layer, geometry, entries, size) // size

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        super().fits(name, geometry, entries)
        for layer in geometry.full_layers:
            self._groups(layer, geometry, entries)

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return NewestGroups(self._groups(site.layer, site.geometry, site.entries), self.codec(site))

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        groups, size = self._groups(layer, geometry, entries), self.size(layer, geometry)
        return group_holds(layer, geometry, groups, left, size, self.written(layer, geometry))
