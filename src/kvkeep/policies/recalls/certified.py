"""``certified``: recalls entries until the attention of the others is provably below a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.recalls.selective import SelectiveRecall
from kvkeep.stores.readers.code_bounds import CodeBounds, code_bounds_bytes


BINS = 128
"""Bins of entries by the logarithm of what each of them can have."""


@dataclass(frozen=True)
class Certified(SelectiveRecall):
    """In each step every KV head recalls entries until little is left out for certain.

    Codes of all keys, and the lengths of their errors, bound the scores of every entry. Entries are recalled in falling
    order of their maximum contribution. By the bounds, the others then receive at most ``share`` of the attention of
    each query of the head."""

    share: float = 0.01
    """Maximum share of a query's attention to entries that are not recalled."""
    bits: int = 8
    """Bits of a code of a key: 2, 4 or 8."""

    label: ClassVar[str] = "entries, until little is left out for certain"
    source: ClassVar[str] = "kvkeep; codes after arXiv:2402.02750"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise UsageError(
                f"The share of attention that may be left out is at least 0 and below 1, not {self.share:g}."
            )
        if self.bits not in (2, 4, 8):
            raise UsageError(f"Recall 'certified' has codes of 2, 4 or 8 bits, not {self.bits}.")

    def bounds(self) -> CodeBounds:
        return CodeBounds(self.bits)

    def choose(self, excess: Tensor) -> Tensor:
        """Choose the entries whose largest bound is above a threshold: the lowest one at which the others can have at
        most :attr:`share` of the attention of every query, whatever the chosen ones have."""
        if not self.share:
            return torch.ones_like(excess[:, 0, 0], dtype=torch.bool)
        parts = (excess - math.log(self.share / (1 - self.share))).clamp_(max=1.0).exp_()  # 1: all that may be left out
        ranks = parts.amax((1, 2)).log_().mul_(-BINS / math.log(2 * parts.shape[3])).clamp_(-1, BINS - 1)
        bins = ranks.add_(1).long()  # 0: an entry that has more by itself
        sums = parts.new_zeros(*parts.shape[:3], BINS + 1).scatter_add_(3, bins[:, None, None].expand_as(parts), parts)
        full = sums.flip(3).cumsum(3).flip(3).gt_(1).amax((1, 2))  # of a bin and all behind it
        return bins < full.sum(1, keepdim=True)

    def bound_bytes(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int) -> int:
        return code_bounds_bytes(layer.kv_heads, layer.key_dim, self.bits, tokens)
