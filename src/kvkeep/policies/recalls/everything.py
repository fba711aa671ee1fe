"""The recall of a selector with a checkpoint where none is named: every step attends to all entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.contracts.recall import Reader, Recall
from kvkeep.contracts.site import Site
from kvkeep.stores.readers.read_checkpoint import ReadCheckpoint


@dataclass(frozen=True)
class Everything(Recall):
    """Every step attends to the checkpoint, which holds all entries in the order of the text."""

    label: ClassVar[str] = ""

    def reader(self, site: Site, shared: Any) -> Reader:
        return ReadCheckpoint(site)
