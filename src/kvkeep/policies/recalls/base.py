"""What a recall is: how entries that left come back, by parameters and a promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvkeep.policies.request import Exactness


@dataclass(frozen=True)
class Recall(ABC):
    """How entries come back from checkpoints that hold all of them. One file for each: a frozen dataclass whose fields
    are its parameters."""

    label: ClassVar[str]
    exactness: ClassVar[Exactness]

    @abstractmethod
    def tail(self, entries: int) -> int:
        """Return how many of a layer's budget of ``entries`` are for entries that are not settled."""
