"""``sketch``: evicted entries are added to a count sketch, and attention reads estimates of them (KVReviver)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.site import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError, UsageError, unknown
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.stores.evicted.sketch import MEDIAN
from kvkeep.stores.evicted.sketched import Hashed, Sketched

_CHOICES = {
    "estimate": ("plain", "centred", "shrunk"),
    "by": ("median", "mean"),
    "keys": ("unsigned", "averaged", "signed"),
}


@dataclass(frozen=True)
class Sketch(Fate):
    """Part of the budget is a count sketch (:mod:`kvkeep.stores.evicted.sketch`), the rest exact entries."""

    vague: float = 0.1
    """The sketch's share of the budget."""
    swap: float = 0.0
    """An entry's estimate becomes resident when its rank exceeds this factor times the rank of the lowest resident
    entry; 0: never."""
    estimate: str = "plain"
    """The kind of estimate: "plain", "centred" or "shrunk"."""
    by: str = "median"
    """How an estimate combines the rows: "median" or "mean"."""
    keys: str = "unsigned"
    """Whether keys have random signs, as values do: "signed" or "unsigned"; "averaged" keys are unsigned, and a cell is
    divided by the number of its keys."""
    rows: int = 3
    """Rows of slots that every entry is added to."""

    label: ClassVar[str] = "sketched"
    source: ClassVar[str] = "KVReviver, Algorithms 1 to 4"
    returns: ClassVar[str] = "approximately, from a count sketch"
    exactness: ClassVar[Exactness] = Exactness.REVERSIBLE
    records: ClassVar[bool] = True  # positions are hashed

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise unknown(f"sketch: {name}", given, choices)
        if self.keys == "averaged" and self.estimate != "plain":
            raise UsageError(
                f"keys=averaged is an estimate already; use it with estimate=plain, not '{self.estimate}'."
            )
        if not 0 < self.vague <= 0.5:
            raise UsageError(
                f"The sketch's share of the budget ('vague') is above 0 and at most 0.5, not {self.vague:g}."
            )
        if self.swap and not self.swap >= 1:
            raise UsageError(f"The 'swap' of a sketch is a factor of at least 1, or 0 for never, not {self.swap:g}.")
        if self.rows not in MEDIAN:
            raise UsageError(f"A sketch has {', '.join(map(str, MEDIAN))} rows, not {self.rows}.")

    def refuses(self, method: Any) -> str | None:
        if self.swap and method.selector.needs_kv:
            return (
                "This selector ranks entries by their keys and values, and a sketch holds only sums of them; use "
                "another selector."
            )
        return None

    def resident(self, entries: int) -> int:
        return entries - self._sketched(entries)

    def _sketched(self, entries: int) -> int:
        """Return the size of the sketch in entries: a multiple of its rows, with two slots or more in each row."""
        return max(2 * self.rows, int(self.vague * entries) // self.rows * self.rows)

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        super().fits(name, geometry, entries)
        if 2 * self._sketched(entries) > entries:
            raise BudgetError(
                f"A budget of {entries} entries is too small for a sketch of {self.rows} rows and exact entries; "
                f"give at least {4 * self.rows}."
            )

    def _slots(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
        """Return the slots in a row of a layer's sketch."""
        entry, (cell, total) = (layer.key_dim + layer.value_dim) * geometry.dtype_bytes, self._tallies(layer)
        return max(1, (self._sketched(entries) * entry - total) // (self.rows * (entry + cell)))

    def _tallies(self, layer: LayerGeometry) -> tuple[int, int]:
        """Return the bytes of float32 tallies: the counts of keys and values for each cell, and their sums over all
        cells."""
        if self.estimate == "plain":
            return 4 * (self.keys == "averaged"), 0
        return 8, 4 * (layer.key_dim + layer.value_dim)

    def shared(self, geometry: ModelGeometry, ledger: Ledger) -> Hashed:
        return Hashed(ledger, self.rows)

    def store(self, site: Site, shared: Hashed) -> EvictedStore:
        slots = self._slots(site.layer, site.geometry, site.entries)
        return Sketched(shared, slots, self.estimate, self.by, self.keys, self.swap, site.meter, site.first)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the bytes of all cells and tallies, and of the estimates of a step."""
        if not sum(left):
            return PredictedBytes()
        cells, width = self.rows * self._slots(layer, geometry, entries), layer.key_dim + layer.value_dim
        cell, total = self._tallies(layer)
        size = cells * (width * geometry.dtype_bytes + cell) + total
        looked_up = sum(left) * (2 * 8 * self.rows + self.rows * width * geometry.dtype_bytes)
        looked_up += 2 * cells * width * geometry.dtype_bytes
        return PredictedBytes(layer.kv_heads * size, workspace=layer.kv_heads * looked_up, entries=sum(left))
