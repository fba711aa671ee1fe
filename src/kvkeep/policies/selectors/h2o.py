"""``h2o``: heavy hitters and the newest entries stay (Zhang et al., arXiv:2306.14048, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.attention.portable import interpolated
from kvkeep.contracts.selector import STAYS, Candidates, Selector
from kvkeep.errors import UsageError


@dataclass(frozen=True)
class H2O(Selector):
    """The newest entries stay, and of the others those that received the most attention from all queries so far."""

    leaves: ClassVar[str] = "all but heavy hitters and newest"
    source: ClassVar[str] = "arXiv:2306.14048, Algorithm 1"
    of_any_layer: ClassVar[bool] = True

    recent: float = 0.5
    """The share of the budget for the newest entries."""
    halflife: int = 0
    """The number of queries after which attention counts half. Attention is then averaged over the queries that could
    attend to the entry, because few could attend to a new one. 0: the sum over all queries, as in the paper."""

    def __post_init__(self) -> None:
        if self.halflife < 0:
            raise UsageError(f"H2O's 'halflife' is a number of queries, or 0 for no decay, not {self.halflife}.")
        if not 0 <= self.recent <= 1:
            raise UsageError(f"H2O's 'recent' is a share from 0 to 1, not {self.recent:g}.")

    @property
    def observation_window(self) -> None:
        """None: all queries count, including those of the prompt."""
        return None

    @property
    def accumulates(self) -> bool:
        return not self.halflife

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Add the attention to the sum, or to the running mean."""
        assert entries.scores is not None
        if not self.halflife:
            return entries.scores + weights
        seen = entries.length - entries.slots
        share = (queries / seen).clamp(1 - 0.5 ** (queries / self.halflife), 1.0)
        mean = weights if queries == 1 else weights / seen.clamp(max=queries)
        return interpolated(entries.scores, mean, share)

    def rank(self, entries: Candidates) -> Tensor:
        assert entries.scores is not None
        return entries.scores.masked_fill(entries.slots >= entries.length - int(self.recent * entries.budget), STAYS)
