"""No eviction: the methods that keep everything, and how their entries lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector


@dataclass(frozen=True)
class Nobody(Selector):
    """All entries stay. ``layout``: "dynamic" (buffers that grow), "static" (allocated once), "paged" (blocks of a
    pool)."""

    layout: str = "dynamic"

    leaves: ClassVar[str] = "none"
    source: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = True

    @property
    def budgeted(self) -> bool:
        """Where memory is allocated once: the most entries there will be."""
        return self.layout == "static"

    def rank(self, entries: Candidates) -> Tensor:
        """Unused: nothing is evicted."""
        return entries.slots
