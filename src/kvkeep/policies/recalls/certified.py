"""``certified``: recalls entries until the attention of the others is provably below a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.recalls.selective import SelectiveRecall
from kvkeep.stores.readers.code_bounds import CodeBounds, code_bounds_bytes


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

    repeats: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise UsageError(
                f"The share of attention that may be left out is at least 0 and below 1, not {self.share:g}."
            )
        if self.bits not in (2, 4, 8):
            raise UsageError(f"Recall 'certified' has codes of 2, 4 or 8 bits, not {self.bits}.")

    def bounds(self) -> CodeBounds:
        return CodeBounds(self.bits)

    def choose(self, excess: Tensor, slack: Callable[[], Tensor]) -> Tensor:
        """Choose entries in falling order until the others can have at most :attr:`share` of the attention of every
        query. The chosen ones are taken to have what their codes say, midway between the bounds. If they have less, the
        others are chosen from again; none is chosen where the certificate holds."""
        highest = excess.amax(3, keepdim=True).clamp(min=0)
        upper = excess - highest
        order = upper.amax((1, 2)).argsort(dim=1, descending=True)
        index = order[:, None, None].expand_as(excess)
        likely = (upper - slack() / 2).exp_().gather(3, index)
        before = likely.cumsum(3).sub_(likely).add_((-highest).exp())  # what has the attention if this one has none
        rest = upper.exp_().gather(3, index).flip(3).cumsum(3).flip(3)  # this entry and all after it
        recalled = (rest > before * (self.share / (1 - self.share))).any(2).any(1)
        return torch.zeros_like(recalled).scatter_(1, order, recalled)

    def bound_bytes(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int) -> int:
        return code_bounds_bytes(layer.kv_heads, layer.key_dim, self.bits, tokens)
