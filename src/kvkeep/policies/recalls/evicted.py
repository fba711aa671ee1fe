"""The recall of methods that name none: what the store of evicted entries gives back by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.recall import Reader, Recall
from kvkeep.contracts.site import Site
from kvkeep.stores.readers.read_evicted import ReadEvicted


@dataclass(frozen=True)
class Evicted(Recall):
    """Every step attends to all that the store has."""

    label: ClassVar[str] = ""
    backed: ClassVar[bool] = False

    def reader(self, site: Site, round: Any) -> Reader:
        return ReadEvicted()
