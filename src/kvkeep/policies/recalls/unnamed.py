"""The recalls of methods that name none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.part import Site
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.stores.layer import ReadEvicted
from kvkeep.stores.readers.backed import ReadCheckpoint


@dataclass(frozen=True)
class Everything(Recall):
    """Every step attends to the checkpoint, which holds all entries in the order of the text: the recall of a selector
    with a checkpoint."""

    label: ClassVar[str] = ""

    def reader(self, site: Site, shared: Any) -> Reader:
        return ReadCheckpoint(site)


@dataclass(frozen=True)
class Evicted(Recall):
    """Every step attends to all entries of the store of evicted entries."""

    label: ClassVar[str] = ""
    backed: ClassVar[bool] = False

    def reader(self, site: Site, shared: Any) -> Reader:
        return ReadEvicted()
