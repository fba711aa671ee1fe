"""The recall of methods that name none: every step attends to all entries of the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.recall import Reader, Recall
from kvkeep.contracts.site import Site
from kvkeep.stores.readers.read_evicted import ReadEvicted


@dataclass(frozen=True)
class Evicted(Recall):
    """Every step attends to all entries of the store of evicted entries."""

    label: ClassVar[str] = ""
    backed: ClassVar[bool] = False

    def reader(self, site: Site, shared: Any) -> Reader:
        return ReadEvicted()
