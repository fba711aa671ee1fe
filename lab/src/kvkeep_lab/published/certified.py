"""``certified``: recalls pages until the attention of the others is provably below a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.policies.recalls.selective import PagesThatMatter


@dataclass(frozen=True)
class Certified(PagesThatMatter):
    """In each step every KV head recalls pages of 32 tokens until little is left out for certain.

    Pages are recalled in falling order of their maximum contribution. By the bounds of their keys, the other pages then
    receive at most ``share`` of the attention of each query of the head."""

    share: float = 0.01
    """Maximum share of a query's attention to pages that are not recalled."""

    label: ClassVar[str] = "pages, until little is left out for certain"
    source: ClassVar[str] = "kvkeep; bounds as in arXiv:2406.10774"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise UsageError(
                f"The share of attention that may be left out is at least 0 and below 1, not {self.share:g}."
            )

    def choose(self, excess: Tensor) -> Tensor:
        """Choose pages in falling order until S / (1 + S) of the others is at most :attr:`share` for every query."""
        order = excess.amax((1, 2)).argsort(dim=1, descending=True)
        mass = excess.exp().gather(3, order[:, None, None].expand_as(excess))
        rest = mass.flip(3).cumsum(3).flip(3).amax((1, 2))  # sum over this page and all after it
        return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, rest > self.share / (1 - self.share))
