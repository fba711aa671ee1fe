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
    """The memory layout: "dynamic" (buffers that grow), "static" (allocated once), or "paged" (blocks of a pool)."""

    leaves: ClassVar[str] = "none"
    source: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = True

    @property
    def budgeted(self) -> bool:
        """Whether the layout needs a budget: a static cache needs the number of entries to allocate."""
        return self.layout == "static"

    def rank(self, entries: Candidates) -> Tensor:
        """Return any ranks: they are unused, because no entry is evicted."""
        return entries.slots
