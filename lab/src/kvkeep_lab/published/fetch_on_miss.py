"""``fetch-on-miss``: entries come back after the step that would have used them (llama.cpp pull request 21097)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.stores.slots import compact
from kvkeep_lab.published.page_bounds import PAGE
from kvkeep_lab.published.selective_recall import SelectiveRecall


@dataclass(frozen=True)
class FetchOnMiss(SelectiveRecall):
    """A step attends to the resident entries. Evicted entries that it may have missed become resident after it.

    A step may have missed an entry if, by the bounds of the keys, some query could have given it ``threshold`` of its
    attention. The entries with the highest bounds come back first, at most half of a KV head's budget, so that entries
    in use stay."""

    limit: int = 64
    """The maximum number of a KV head's entries that come back after a step."""
    threshold: float = 0.0
    """The share of attention; 0 is 1/T after T tokens."""

    label: ClassVar[str] = "entries that the last step may have missed"
    source: ClassVar[str] = "llama.cpp pull request 21097"
    fetches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.limit < 0 or not 0 <= self.threshold <= 1:
            raise UsageError("Recall 'fetch-on-miss' takes a limit of at least 0 and a threshold from 0 to 1.")

    def fetch(self, bounds: Tensor, tokens: Tensor | int, free: Callable[[int], Tensor], away: Tensor) -> Tensor:
        """Return entries of pages that may have been used, the highest bound first."""
        by_page = away.unflatten(1, (-1, PAGE))
        used = math.log(self.threshold) if self.threshold else -torch.as_tensor(tokens).log()
        missed = by_page & (bounds >= used)[..., None]
        highest = bounds.masked_fill(~missed.any(2), float("-inf"))
        order = highest.topk(min(self.limit, bounds.shape[1]), dim=1).indices
        slots = (order[..., None] * PAGE + torch.arange(PAGE, device=order.device)).flatten(1)
        wanted = missed.flatten(1).gather(1, slots)
        wanted &= wanted.cumsum(1) <= free(self.limit)
        chosen = compact(wanted)
        return slots.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)

    def refuses(self, method: Any) -> str | None:
        if method.store_fate.stores.keeps:
            return (
                "Recall 'fetch-on-miss' makes evicted entries resident again, and with this fate they would also be "
                "attended in another form; leave the fate out."
            )
        return super().refuses(method)

    def recalled(self, away: int) -> int:
        return min(away, self.limit)
