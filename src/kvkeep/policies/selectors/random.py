"""``random``: chance decides who stays; what any method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.policies.selectors.base import Selector
from kvkeep.stores.hashes import scattered
from kvkeep.stores.selected import Candidates


@dataclass(frozen=True)
class Random(Selector):
    """Each entry draws a number when it comes in, from ``seed``, layer, head and slot alone: the same on every device,
    in every batch, and after a rollback."""

    leaves: ClassVar[str] = "anyone"
    source: ClassVar[str] = "a baseline"

    seed: int = 0

    @property
    def enters(self) -> bool:
        """The mark is drawn."""
        return True

    def enter(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Hash (seed, layer, head, slot) to a number in [0, 1)."""
        lanes = torch.arange(entries.slots.shape[0], device=keys.device)[:, None] % entries.heads
        numbers = entries.slots.long() + (lanes << 24) + (entries.layer << 32) + (self.seed << 40)
        return (scattered(numbers) & 0xFFFFFF).float() / 2**24

    def rank(self, entries: Candidates) -> Tensor:
        """By the mark."""
        assert entries.marks is not None
        return entries.marks
