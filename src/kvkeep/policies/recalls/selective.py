"""What recalls of single pages have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.policies.recalls.base import Recall
from kvkeep.policies.request import Exactness, LiveFate
from kvkeep.stores.checkpoints import Checkpoint
from kvkeep.stores.drafting import Round
from kvkeep.stores.logged import LoggedLayer
from kvkeep.stores.parts import Parts
from kvkeep.stores.selective import SelectiveLayer


class Selective(Recall):
    """A recall of some pages, whose choice is :meth:`choose`."""

    exactness: ClassVar[Exactness] = Exactness.REVERSIBLE

    def check(self, fate: LiveFate, log: Checkpoint) -> None:
        """Refuse checkpoints that rebuild everything or nothing, and fates that would hold entries a second time."""
        if not log.picks:
            raise UsageError(
                "Recalling single entries needs checkpoint kind 'kv' or 'residual': the others rebuild all."
            )
        if not fate.forgets:
            raise UsageError(
                "A recall of single entries takes no fate but 'checkpoint': what left is all in checkpoints."
            )

    def layers(self, log: Checkpoint, round: Round | None) -> Callable[[Parts], LoggedLayer]:
        """Return layers that ask it which pages to recall."""
        return partial(SelectiveLayer, log=log, choice=self)

    def choose(self, excess: Tensor) -> Tensor | None:
        """Return which pages each lane recalls: here none. See :class:`kvkeep.stores.selective.Choice`."""
        return None
