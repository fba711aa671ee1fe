"""What selectors have in common that score many entries at once, and decoded tokens not at all."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvkeep.contracts.selector import STAYS, Candidates, Selector

HIGHEST = 2.0**98
"""Above every score; those of entries that were not scored begin at 2^100."""


class Scored(Selector):
    """Those of highest score, after the first ``sinks``, which stay. What is read without being scored stays, and what
    has the lowest score leaves; when nothing scored is left, the oldest leaves."""

    scores_arrivals: ClassVar[bool] = True
    sinks: int = 0

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return scores above all scores that grow with the slot; float32 tells 2^23 of them apart."""
        return (entries.slots + 2**23).float() * 2.0**77

    def rank(self, entries: Candidates) -> Tensor:
        """Return the scores; sinks stay, whatever came after them."""
        assert entries.scores is not None
        return entries.scores.masked_fill(entries.slots < entries.first + self.sinks, STAYS)
