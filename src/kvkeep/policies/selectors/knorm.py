"""``knorm``: keys of small norm stay (Devoto et al., arXiv:2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector


@dataclass(frozen=True)
class KNorm(Selector):
    """The entries with the smallest L2 norm of the key stay."""

    leaves: ClassVar[str] = "entries with the largest key norms"
    source: ClassVar[str] = "arXiv:2406.11430"
    scores_arrivals: ClassVar[bool] = True

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        return -keys.float().norm(dim=-1)
