"""Nobody leaves: the methods that keep everything, and how their entries lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.contracts import Candidates, EvictedStore, Exactness, Fate, Selector, Site
from kvkeep.policies.fates.drop import Dropped


@dataclass(frozen=True)
class Nobody(Selector):
    """Nobody leaves. ``layout``: "dynamic" (buffers that grow), "static" (allocated once), "paged" (blocks of a
    pool)."""

    layout: str = "dynamic"

    leaves: ClassVar[str] = "nobody"
    source: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = True

    @property
    def budgeted(self) -> bool:
        """Where memory is allocated once: the most entries there will be."""
        return self.layout == "static"

    def rank(self, entries: Candidates) -> Tensor:
        """By slot; never asked."""
        return entries.slots


@dataclass(frozen=True)
class Kept(Fate):
    """What becomes of entries that do not leave."""

    label: ClassVar[str] = "kept"
    returns: ClassVar[str] = "not needed"
    exactness: ClassVar[Exactness] = Exactness.EXACT
    keeps: ClassVar[bool] = False

    def store(self, site: Site, shared: Any) -> EvictedStore:
        """Return the one that holds nothing."""
        return Dropped()
