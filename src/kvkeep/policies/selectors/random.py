"""``random``: entries stay at random; the baseline for every other method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.attention.portable import scattered
from kvkeep.contracts.selector import Candidates, Selector
from kvkeep.errors import UsageError


@dataclass(frozen=True)
class Random(Selector):
    """Each new entry gets a random number, and the lowest numbers are evicted. The number depends only on seed, layer,
    head and slot: it is the same on every device, in every batch, and after a rollback."""

    leaves: ClassVar[str] = "any entry, at random"
    source: ClassVar[str] = "a baseline"
    across_heads: ClassVar[bool] = True
    scores_arrivals: ClassVar[bool] = True

    seed: int = 0
    """An integer of 24 bits."""

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Hash (seed, layer, head, slot) to a number in [0, 1)."""
        return sampled(entries.slots, entries.heads, entries.layer, self.seed)


def check_seed(seed: int) -> None:
    """Raise UsageError for a seed that :func:`sampled` cannot take: of 64 bits, 40 are layer, head and slot."""
    if not -(2**23) <= seed < 2**23:
        raise UsageError(f"A seed is a whole number from {-(2**23)} to {2**23 - 1}, not {seed}.")


def sampled(slots: Tensor, heads: int, layer: int, seed: int) -> Tensor:
    """Return a number in [0, 1) for each of ``slots`` (lanes, entries), ``heads`` lanes to a row."""
    lanes = torch.arange(slots.shape[0], device=slots.device)[:, None] % heads
    numbers = slots.long() + (lanes << 24) + (layer << 32) + (seed << 40)
    return (scattered(numbers) & 0xFFFFFF).float() / 2**24
