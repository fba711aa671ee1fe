"""Fates that merge neighbours: instead of an eviction, the least attended neighbours become one entry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.budget import MIN_CHUNK
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.site import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.stores.evicted.merge_neighbours import MergeNeighbours
from kvkeep.stores.evicted.pairs import PairMerging


@dataclass(frozen=True)
class MergesPairs(Fate):
    """The parameters that all these fates share."""

    sinks: int = 32
    """First entries of a row that are never merged."""
    cap: int = 5
    """The largest count of a merged entry; 0: no limit."""
    slack: float = 0.125
    """Pairs merged at a time while decoding: a share of the budget, or (from 1 on) a number."""

    label: ClassVar[str] = "merged"
    leaves: ClassVar[str] = "the least attended neighbours"
    makes_room: ClassVar[bool] = True
    keeps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UsageError(f"The number of sinks is 0 or more, not {self.sinks}.")
        if self.cap != 0 and self.cap < 2:
            raise UsageError(f"The cap of a merged entry is 2 or more, or 0 for no limit, not {self.cap}.")
        if not self.slack > 0:
            raise UsageError(f"The slack is a share of the budget or a number of pairs, not {self.slack:g}.")

    def chunk(self, name: str, entries: int, chunk: int, chosen: bool) -> int:
        """Return the tokens of a prompt to read at a time: by default a quarter of the budget, as in the papers (512 of
        2,048). A chunk as long as the budget would merge nearly everything each time."""
        return chunk if chosen else min(chunk, max(MIN_CHUNK, entries // 4))

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        super().fits(name, geometry, entries)
        self.check_room(name, entries)

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        full = [layer.index for layer in geometry.full_layers]
        bind(model).require("turn", full, "merging, which turns keys to new positions", "use h2o+merge")

    @abstractmethod
    def check_room(self, name: str, entries: int) -> None:
        """Raise BudgetError where ``entries`` leave nothing to merge."""

    def pairs_at_once(self, budget: int) -> int:
        """Return the number of pairs merged at a time while decoding with a ``budget`` of entries: at most a quarter of
        the entries that may merge."""
        wanted = int(self.slack) if self.slack >= 1 else int(self.slack * budget)
        return max(1, min(wanted, (budget - self.sinks) // 4))


@dataclass(frozen=True)
class Neighbours(MergesPairs, PairMerging):
    """Merges the least attended neighbours, by the queries so far. A subclass is a frozen dataclass that defines
    :meth:`share`."""

    merging: ClassVar[type[MergeNeighbours]] = MergeNeighbours
    """The class of its stores."""

    def refuses(self, method: Any) -> str | None:
        reason = "Merging chooses neighbours by accumulated attention; use h2o with halflife=0, which keeps it."
        return None if method.selector.accumulates else reason

    def check_room(self, name: str, entries: int) -> None:
        if entries < self.sinks + 4:
            raise BudgetError(
                f"A budget of {entries} entries leaves '{name}' too few to merge beside {self.sinks} sinks; give "
                f"at least {self.sinks + 4}, or fewer sinks ({name.partition('+')[0].partition(':')[0]}:sinks=4)."
            )

    def store(self, site: Site, shared: Any) -> EvictedStore:
        budget = min(site.budgets)
        self.check_room(f"layer {site.layer.index}", budget)
        return self.merging(site, self, bind(site.model), self.pairs_at_once(budget))

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the bytes of temporary tensors: the pairs before and after they are merged."""
        longest = max(left, default=0)
        merged = entries + longest if longest else 0
        return PredictedBytes(workspace=4 * merged * layer.entry_elements * geometry.dtype_bytes)
