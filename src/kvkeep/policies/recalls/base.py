"""What a recall is: how entries that left come back, by parameters and a promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvkeep.policies.request import Exactness, LiveFate
from kvkeep.stores.checkpoints import Checkpoint
from kvkeep.stores.drafting import Round
from kvkeep.stores.logged import LoggedLayer
from kvkeep.stores.parts import Parts


@dataclass(frozen=True)
class Recall(ABC):
    """How entries come back from checkpoints that hold all of them. One file for each: a frozen dataclass whose fields
    are its parameters."""

    label: ClassVar[str]
    exactness: ClassVar[Exactness]

    options: ClassVar[tuple[str, ...]] = ("budget", "checkpoint", "where", "folder", "chunk", "page")
    place: ClassVar[str | None] = None  # where its checkpoints are by default, None: as for every method

    def check(self, fate: LiveFate, log: Checkpoint) -> None:
        """Raise UsageError where it cannot work with what else was asked for."""
        return

    def round(self, entries: int) -> Round | None:
        """Return the rounds of draft and verify that it decodes in, of a layer's budget of ``entries``; None: it does
        not."""
        return None

    @abstractmethod
    def layers(self, log: Checkpoint, round: Round | None) -> Callable[[Parts], LoggedLayer]:
        """Return what makes a layer of its parts."""
