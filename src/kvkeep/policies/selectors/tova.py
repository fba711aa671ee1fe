"""``tova``: the entries that the last query attends to stay (Oren et al., arXiv:2401.06104, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector


@dataclass(frozen=True)
class Tova(Selector):
    """The entries with the most attention from the last query stay, by the mean over all heads: one choice for the
    layer."""

    leaves: ClassVar[str] = "least attended by the last query"
    source: ClassVar[str] = "arXiv:2401.06104"
    across_heads: ClassVar[bool] = True
    of_any_layer: ClassVar[bool] = True

    @property
    def observation_window(self) -> int:
        return 1

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the attention of the last query: the mean over the heads of a row."""
        mean = weights.unflatten(0, (-1, entries.heads)).mean(1, keepdim=True)
        return mean.repeat(1, entries.heads, 1).flatten(0, 1)
