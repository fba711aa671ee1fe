"""``verified``: drafts within the budget, then one exact pass over the whole run (speculative decoding with itself)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvkeep.errors import BudgetError, UsageError
from kvkeep.policies.recalls.base import Recall
from kvkeep.policies.request import Exactness
from kvkeep.stores.checkpoints import Checkpoint
from kvkeep.stores.drafting import DraftingLayer, Round
from kvkeep.stores.parts import Parts


@dataclass(frozen=True)
class Verified(Recall):
    """Tokens are drafted with what is resident, and a run of them is verified at once: every page is recalled once for
    all its positions. What is accepted is what the unbounded cache gives, token for token; the first that is wrong is
    replaced. ``longest``: the most tokens drafted before they are verified."""

    longest: int = 24

    label: ClassVar[str] = "verified, once for a run of drafts"
    exactness: ClassVar[Exactness] = Exactness.EXACT

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise UsageError(f"A run has at least one drafted token, not {self.longest}.")

    def round(self, entries: int) -> Round:
        """Return rounds with room for the drafts and the token before them, half the budget at most."""
        if entries < 4:
            raise BudgetError(
                f"A budget of {entries} entries has no room for drafts beside what they attend to; give it at least 4, "
                "or use kv-direct."
            )
        return Round(min(self.longest + 1, entries // 2))

    def layers(self, log: Checkpoint, round: Round | None) -> Callable[[Parts], DraftingLayer]:
        """Return layers that draft."""
        assert round is not None
        return partial(DraftingLayer, log=log, round=round)
