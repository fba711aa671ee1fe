"""``adakv``: SnapKV with a layer's budget divided between its heads by their votes (Feng et al., arXiv:2407.11550)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.policies.selectors.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV, with a layer's budget divided between its KV heads: the entries with the most votes in the whole layer
    decide how many each head keeps.

    Beside the window, a head has ``least`` of the mean budget. The rest is divided in proportion to the number of its
    entries among the best of all heads of the layer, as many as the budget of the layer. The authors divide once, after
    a prompt that is read in one pass (``adakv+oneshot``). Here every chunk that overflows the budget divides it again.
    Decoded tokens do not.
    """

    leaves: ClassVar[str] = "as snapkv; heads with fewer votes keep fewer"
    source: ClassVar[str] = "arXiv:2407.11550"
    across_heads: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    least: float = 0.2
    """The share of the mean budget beside the window that every KV head has (the authors' safeguard, alpha)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least <= 1:
            raise UsageError(f"Ada-KV's least share of a KV head ('least') is from 0 to 1, not {self.least:g}.")

    def shares(self, received: Sequence[Tensor], rows: int, entries: int) -> list[list[int]]:
        """Return the window, and beside it (1 - ``least``) times the number of the lane's best entries and ``least``
        times the mean budget, rounded down. The first lanes of a row have the remainder."""
        window = min(self.window, entries // 2)
        divided = []
        for part in received:
            ranks = part.unflatten(0, (rows, -1))  # (rows, KV heads, n)
            heads, columns = ranks.shape[1:]
            order = ranks.flatten(1).argsort(dim=1, descending=True, stable=True)[:, : heads * entries]
            there = (ranks.flatten(1).gather(1, order) > float("-inf")).long()
            best = torch.zeros(rows, heads, dtype=torch.int64, device=part.device)
            best.scatter_add_(1, order // columns, there)
            beside = (best - window).clamp(min=0).double()
            share = window + ((1 - self.least) * beside + self.least * (entries - window)).long()
            left = heads * entries - share.sum(1, keepdim=True)
            share += left // heads + (torch.arange(heads, device=part.device) < left % heads)
            divided.append(share.flatten().tolist())
        return divided
