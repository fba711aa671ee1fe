"""``kvzip``: the entries that the text attends to when it is repeated stay (Kim et al., arXiv:2505.23416)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.selector import ReconstructionPieces
from kvkeep.errors import UsageError
from kvkeep.policies.selectors.scored import Scored


@dataclass(frozen=True)
class KVzip(Scored):
    """The entries that receive the most attention when the text is read a second time stay.

    The score of an entry is the largest weight that any query of the repeated text gives it, in any head that shares
    the entry. Weights are normalised over the entries of a piece and the sinks. Each KV head has a share of the mean
    budget, which later tokens will use. The rest goes to the entries with the highest scores of all layers and heads.

    Entries that are read later get no score and stay; the lowest score is evicted first, and then the oldest entry.
    """

    leaves: ClassVar[str] = "least attended while the text is repeated"
    source: ClassVar[str] = "arXiv:2505.23416"
    across_heads: ClassVar[bool] = True

    least: float = 0.25
    """The share of the mean budget that every KV head has; with 1 all heads have the same."""
    piece: int = 2000
    """Tokens that are repeated at a time."""
    sinks: int = 4
    """First entries that stay."""

    def __post_init__(self) -> None:
        if not 0 < self.least <= 1:
            raise UsageError(f"The least share of a KV head ('least') is above 0 and at most 1, not {self.least:g}.")
        if self.piece < 1 or self.sinks < 0:
            raise UsageError("KVzip takes a piece of at least 1 token and at least 0 sinks.")

    @property
    def reconstruction(self) -> ReconstructionPieces:
        return ReconstructionPieces(self.piece, self.sinks)

    def shares(self, received: Sequence[Tensor], rows: int, entries: int) -> list[list[int]]:
        """Return the entries of every lane: its guaranteed share, one for each of its entries among the best of its
        row, and an equal part of the remainder of a short row; rounded down."""
        each = max(1, int(self.least * entries))
        scores = torch.cat([part.unflatten(0, (rows, -1)) for part in received], 1)  # (rows, KV heads of all layers, n)
        heads, slots = scores.shape[1:]
        best = scores.flatten(1).topk(min((entries - each) * heads, heads * slots))
        wanted = (best.values > float("-inf")).long()
        counts = torch.zeros(rows, heads, dtype=torch.int64, device=scores.device)
        counts.scatter_add_(1, best.indices // slots, wanted)
        counts += each + ((entries - each) * heads - counts.sum(1, keepdim=True)) // heads
        parts = counts.split([len(part) // rows for part in received], 1)
        return [part.flatten().tolist() if self.least < 1 else [entries] for part in parts]
