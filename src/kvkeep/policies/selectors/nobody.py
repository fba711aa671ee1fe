"""No eviction: the methods that keep everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvkeep.contracts.selector import Selector
from kvkeep.stores.dynamic import DynamicLayer


@dataclass(frozen=True)
class Nobody(Selector):
    """All entries stay."""

    leaves: ClassVar[str] = "none"
    source: ClassVar[str] = ""
    keeps_all: ClassVar[bool] = True
    budgeted: ClassVar[bool] = False

    def layer(self, entries: int | None, pieces: bool) -> DynamicLayer:
        return DynamicLayer(pieces)
