"""``certified``: recalls entries such that the attention of the others is provably below a bound."""

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
"""Bins of entries, by the logarithm of the attention that an entry may have. All entries of a bin are recalled, or
none."""


@dataclass(frozen=True)
class Certified(SelectiveRecall):
    """In each step every KV head recalls the entries whose attention can matter.

    Codes of all keys, and the lengths of their errors, bound the scores of every entry. The entries with the largest
    bounds are recalled, so many that the others certainly receive at most ``share`` of the attention of each query of
    the head."""

    share: float = 0.01
    """Maximum share of a query's attention to entries that are not recalled."""
    bits: int = 8
    """Bits of a code of a key: 2, 4 or 8."""

    label: ClassVar[str] = "entries whose attention can matter"
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

    def choose(self, excess: Tensor, slack: Tensor) -> Tensor:
        """Choose the entries with the largest bounds, and as few as :data:`BINS` allow: of the attention of every query
        the others have at most :attr:`share`, even if they have all that their bounds allow, and the chosen ones have
        the least."""
        if not self.share:
            return torch.ones_like(excess[:, 0, 0], dtype=torch.bool)
        # If the bounds allow all entries T and the others L of it, the rest of the attention is at least
        # 1 + exp(-slack) (T - L). L may be ``ratio`` of that.
        ratio, highest = self.share / (1 - self.share), excess.amax(3, keepdim=True).clamp_(min=0)
        everything = (excess - highest).exp_().sum(3, keepdim=True).log_() + highest
        allowed = torch.logaddexp(torch.zeros_like(slack), everything - slack) - (ratio * (-slack).exp()).log1p()
        logs = (excess - allowed - math.log(ratio)).clamp_(max=1.0)  # of parts of L; above 0 is too much by itself
        ranks = logs.amax((1, 2)).mul_(-BINS / math.log(logs.shape[3] + 1)).clamp_(-1, BINS - 1)
        parts = logs.exp_()
        bins = ranks.floor_().add_(1).long()
        sums = parts.new_zeros(*parts.shape[:3], BINS + 1).scatter_add_(3, bins[:, None, None].expand_as(parts), parts)
        full = sums.flip(3).cumsum(3).flip(3).gt_(1).amax((1, 2))  # whether a bin and all behind it have too much
        return bins < full.sum(1, keepdim=True)

    def bound_bytes(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int) -> int:
        return code_bounds_bytes(layer.kv_heads, layer.key_dim, self.bits, tokens)
