"""``sketch``: evicted entries are added to a count sketch, and attention reads estimates of them (KVReviver)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.stores.evicted.sketch import ROWS
from kvkeep.stores.evicted.sketched import Hashed, Sketched


@dataclass(frozen=True)
class Sketch(Fate):
    """Part of the budget is a count sketch (:mod:`kvkeep.stores.evicted.sketch`), the rest exact entries."""

    vague: float = 0.1
    """The sketch's share of the budget."""
    swap: float = 0.0
    """An entry's estimate becomes resident when its rank exceeds this factor times the rank of the lowest resident
    entry; 0: never."""

    label: ClassVar[str] = "sketched"
    source: ClassVar[str] = "KVReviver, Algorithms 1 to 4"
    returns: ClassVar[str] = "approximately, from a count sketch"
    exactness: ClassVar[Exactness] = Exactness.REVERSIBLE
    records: ClassVar[bool] = True  # positions are hashed

    def __post_init__(self) -> None:
        if not 0 < self.vague <= 0.5:
            raise UsageError(
                f"The sketch's share of the budget ('vague') is above 0 and at most 0.5, not {self.vague:g}."
            )
        if self.swap and not self.swap >= 1:
            raise UsageError(f"The 'swap' of a sketch is a factor of at least 1, or 0 for never, not {self.swap:g}.")

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
        return max(2 * ROWS, int(self.vague * entries) // ROWS * ROWS)

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        super().fits(name, geometry, entries)
        if 2 * self._sketched(entries) > entries:
            raise BudgetError(
                f"A budget of {entries} entries is too small for a sketch of {ROWS} rows and exact entries; "
                f"give at least {4 * ROWS}."
            )

    def slots(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
        """Return the slots in a row of a layer's sketch."""
        return self._sketched(entries) // ROWS

    def shared(self, geometry: ModelGeometry, ledger: Ledger) -> Hashed:
        return Hashed(ledger)

    def store(self, site: Site, shared: Hashed) -> EvictedStore:
        slots = self.slots(site.layer, site.geometry, site.entries)
        return Sketched(shared, slots, self.swap, site.meter, site.first)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the bytes of all cells, and of the estimates of a step."""
        if not sum(left):
            return PredictedBytes()
        entry = (layer.key_dim + layer.value_dim) * geometry.dtype_bytes
        size = ROWS * self.slots(layer, geometry, entries) * entry
        looked_up = sum(left) * ROWS * (2 * 8 + entry) + 2 * size
        return PredictedBytes(layer.kv_heads * size, workspace=layer.kv_heads * looked_up, entries=sum(left))
