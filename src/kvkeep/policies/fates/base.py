"""What a fate is: parameters, a promise, and how to set it to work in a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvkeep.geometry import ModelGeometry
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.checkpoints import Checkpoint, CheckpointSpec
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter


@dataclass(frozen=True)
class Fate:
    """What becomes of entries that leave. One file for each: a frozen dataclass whose fields are its parameters."""

    label: ClassVar[str]
    recall: ClassVar[str]
    exactness: ClassVar[Exactness]
    options: ClassVar[tuple[str, ...]] = ()  # of the cache, that it has a use for
    records: ClassVar[bool] = False  # whether ids and positions of all tokens are needed

    def resident(self, geometry: ModelGeometry, entries: int) -> int:
        """Return how many of the budget's ``entries`` are for resident ones."""
        return entries

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Set it to work for one cache."""
        raise NotImplementedError

    def checkpoint(self, live: LiveFate) -> tuple[CheckpointSpec | None, Checkpoint | None]:
        """Return the checkpoint behind it, if there is one."""
        return None, None
