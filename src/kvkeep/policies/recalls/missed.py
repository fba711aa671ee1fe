"""``missed``: entries come back after the step that would have used them (llama.cpp pull request 21097)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvkeep.errors import UsageError
from kvkeep.policies.recalls.selective import Selective
from kvkeep.stores.checkpoints import Checkpoint
from kvkeep.stores.drafting import Round
from kvkeep.stores.logged import LoggedLayer
from kvkeep.stores.missed import MissedLayer
from kvkeep.stores.parts import Parts


@dataclass(frozen=True)
class Missed(Selective):
    """A step attends to what is resident; what it may have missed is resident for the next one.

    Missed is what a query might have given ``threshold`` of its attention, by the bounds of the keys; 0 stands for 1/T
    with T tokens so far. At most ``limit`` entries of a KV head come back, the highest bound first."""

    limit: int = 64
    threshold: float = 0.0

    label: ClassVar[str] = "what a step missed, for the next"
    options: ClassVar[tuple[str, ...]] = ("budget", "checkpoint", "where", "capacity", "folder", "chunk", "page")
    place: ClassVar[str | None] = "host"

    def __post_init__(self) -> None:
        if self.limit < 0 or not 0 <= self.threshold <= 1:
            raise UsageError("A recall of what was missed has a limit from 0 on and a threshold from 0 to 1.")

    def layers(self, log: Checkpoint, round: Round | None) -> Callable[[Parts], LoggedLayer]:
        """Return layers that bring back after a step what it missed."""
        return partial(MissedLayer, log=log, choice=self)
