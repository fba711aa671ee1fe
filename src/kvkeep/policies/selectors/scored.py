"""Selectors that score the entries of a prompt, but no decoded tokens."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvkeep.contracts.selector import STAYS, Candidates, Selector

HIGHEST = 2.0**98
"""A number above every score; ranks of entries without a score begin at 2^100."""


class Scored(Selector):
    """The entries with the highest scores stay, and so do entries without a score. The lowest score is evicted first.
    After all scored entries, the oldest is evicted."""

    scores_arrivals: ClassVar[bool] = True
    scores_by_slot: ClassVar[bool] = True
    sinks: int = 0
    """First entries that always stay."""

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return ranks above all scores, which grow with the slot; float32 distinguishes 2^23 of them."""
        return (entries.slots + 2**23).float() * 2.0**77

    def rank(self, entries: Candidates) -> Tensor:
        """Return the scores; sinks stay."""
        assert entries.scores is not None
        return entries.scores.masked_fill(entries.slots < entries.first + self.sinks, STAYS)
