"""``snapkv``: the entries that the prompt's last queries attend to stay (Li et al., arXiv:2404.14469, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.attention.portable import interpolated
from kvkeep.contracts.selector import STAYS, Candidates, Selector
from kvkeep.errors import UsageError


@dataclass(frozen=True)
class SnapKV(Selector):
    """The last entries stay, and those that the last queries attend to most. Each of ``window`` queries votes with its
    attention; votes are max-pooled over ``kernel`` neighbours.

    The paper chooses once, after the prompt. Here the last queries of every chunk of a prompt vote, so that the budget
    holds after each chunk; those of the last chunk are the prompt's last queries. The votes of decoded tokens are a
    running mean over about ``window`` queries.
    """

    leaves: ClassVar[str] = "least attended by the last 32 queries"
    source: ClassVar[str] = "arXiv:2404.14469"
    of_any_layer: ClassVar[bool] = True
    may_tie: ClassVar[bool] = True  # pooling makes neighbours equal

    window: int = 32
    """Queries that vote."""
    kernel: int = 7
    """Neighbours over which votes are pooled: an odd number of entries."""

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise UsageError("SnapKV's window is 1 or more queries, and its kernel an odd number of entries.")

    @property
    def observation_window(self) -> int:
        return self.window

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        assert entries.scores is not None
        if entries.new > 1:
            weights = self._pooled(entries, weights / queries)
            return interpolated(entries.scores, weights, min(1.0, queries / self.window))
        return interpolated(entries.scores, weights, 1 / self.window)

    def _pooled(self, entries: Candidates, votes: Tensor) -> Tensor:
        """Spread each vote to the neighbours among the resident entries, except votes for the window."""
        newest = entries.slots >= entries.length - self.window
        order = entries.slots.argsort(1)
        pooled = F.max_pool1d(votes.masked_fill(newest, 0).gather(1, order), self.kernel, 1, self.kernel // 2)
        return torch.where(newest, votes, torch.empty_like(votes).scatter_(1, order, pooled))

    def rank(self, entries: Candidates) -> Tensor:
        assert entries.scores is not None
        return entries.scores.masked_fill(
            entries.slots >= entries.length - min(self.window, entries.budget // 2), STAYS
        )
