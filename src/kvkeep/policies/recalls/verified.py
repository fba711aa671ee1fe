"""``verified``: drafts within the budget, then one exact pass over all of them (self-speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.part import Site
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.errors import BudgetError, UsageError
from kvkeep.stores.readers.backed import DraftAndVerify
from kvkeep.stores.readers.draft_passes import DraftPasses


@dataclass(frozen=True)
class Verified(Recall):
    """The model drafts tokens with the resident entries. One pass then verifies several of them and recalls every page
    once. Accepted tokens equal those of the unbounded cache; the first wrong one is replaced."""

    longest: int = 24
    """The maximum number of tokens drafted before they are verified."""

    label: ClassVar[str] = "all entries, once for each run of drafts"
    source: ClassVar[str] = "arXiv:2211.17192, a model drafting for itself"
    exactness: ClassVar[Exactness | None] = Exactness.EXACT
    drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise UsageError(f"Recall 'verified' drafts at least 1 token in a run, not {self.longest}.")

    def tail(self, entries: int) -> int:
        """Return the number of entries for the drafts and the token before them, at most half of the budget. Raises
        BudgetError where there are none."""
        if entries < 4:
            raise BudgetError(
                f"A budget of {entries} entries is too small for drafts and the entries they attend to; give at "
                "least 4, or use kv-direct."
            )
        return min(self.longest + 1, entries // 2)

    def reader(self, site: Site, shared: DraftPasses) -> Reader:
        return DraftAndVerify(site, shared)
