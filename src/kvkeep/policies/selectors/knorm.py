"""``knorm``: keys of small norm stay (Devoto et al., arXiv:2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.policies.selectors.base import Selector
from kvkeep.stores.parts import Candidates


@dataclass(frozen=True)
class KNorm(Selector):
    """Those with the smallest L2 norm of the key."""

    leaves: ClassVar[str] = "largest key norms"
    source: ClassVar[str] = "arXiv:2406.11430"

    @property
    def enters(self) -> bool:
        """The mark is the key's."""
        return True

    def enter(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return minus the norm."""
        return -keys.float().norm(dim=-1)

    def rank(self, entries: Candidates) -> Tensor:
        """By the mark."""
        assert entries.marks is not None
        return entries.marks
