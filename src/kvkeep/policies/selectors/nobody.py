"""No eviction: the methods that keep everything, and their memory layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector


@dataclass(frozen=True)
class Nobody(Selector):
    """All entries stay."""

    layout: str = "dynamic"
    """"dynamic" (buffers that grow), "static" (allocated once), or "paged" (blocks of a pool)."""

    leaves: ClassVar[str] = "none"
    source: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = True

    @property
    def budgeted(self) -> bool:
        """A static cache needs a budget: the entries to allocate."""
        return self.layout == "static"

    def rank(self, entries: Candidates) -> Tensor:
        """Unused, because nothing is evicted."""
        return entries.slots
