"""``lru``: the least recently used entry is evicted (llama.cpp pull request 21097)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector
from kvkeep.errors import UsageError


@dataclass(frozen=True)
class LRU(Selector):
    """The most recently used entries stay. A new entry counts as used. So does an entry that received ``threshold`` of
    some query head's attention in a step. All queries of a step have the same time."""

    threshold: float = 0.0
    """The share of attention; 0 is 1/T after T tokens."""

    leaves: ClassVar[str] = "least recently used"
    source: ClassVar[str] = "llama.cpp pull request 21097"
    reduce: ClassVar[str] = "max"  # a single query of a single head is enough
    scores_arrivals: ClassVar[bool] = True
    may_tie: ClassVar[bool] = True  # entries used in one step have the same time

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UsageError(
                f"The share of attention that counts as use ('threshold') is from 0 to 1, not {self.threshold:g}."
            )

    @property
    def observation_window(self) -> None:
        return None

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return the time: tokens so far, padding included."""
        return torch.zeros(entries.slots.shape, device=keys.device).add_(entries.length)

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the scores, with the present time for the entries that were used."""
        assert entries.scores is not None
        used = weights >= (self.threshold or 1 / (entries.length - entries.first))
        return entries.scores.masked_fill(used, entries.length)
