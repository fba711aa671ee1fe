"""``pages``: every KV head recalls the few pages with the highest bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep_lab.published.page_bounds import PAGE
from kvkeep_lab.published.selective_recall import SelectiveRecall

ALL = 2**31
"""A number of pages that no text reaches."""


@dataclass(frozen=True)
class Pages(SelectiveRecall):
    """In each step every KV head recalls the ``count`` pages of 32 tokens with the highest bounds.

    The bound of a page is the maximum that it can add to the head's attention, by the bounds of its keys. Of the step's
    queries, the one with the highest bound counts."""

    count: int = 8
    """Pages of a KV head in a step; :data:`ALL` is "all" in a method's name."""

    label: ClassVar[str] = "the highest-scoring pages"
    source: ClassVar[str] = "Quest, arXiv:2406.10774"

    @classmethod
    def from_spec(cls, text: str) -> Pages:
        """Parse the text behind the name: a number, or "all"."""
        value = text.removeprefix("count=")
        if value not in ("", "all") and not value.isdigit():
            raise UsageError(
                f"'pages:{text}' is not understood: recall 'pages' takes a whole number of them, or 'all'."
            )
        return cls(ALL if value == "all" else int(value or cls.count))

    def choose(self, excess: Tensor) -> Tensor:
        highest = excess.amax((1, 2))
        best = highest.topk(min(self.count, highest.shape[1]), dim=1, sorted=False).indices
        return torch.zeros(highest.shape, dtype=torch.bool, device=highest.device).scatter_(1, best, True)

    def recalled(self, away: int) -> int:
        return min(away, self.count * PAGE)
