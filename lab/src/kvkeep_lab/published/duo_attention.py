"""``duo-attention``: heads that retrieve keep far more than the others (Xiao et al., arXiv:2410.10819)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep_lab.published.retrieval_heads import retrieval_scores


@dataclass(frozen=True)
class DuoAttention(Selector):
    """Retrieval heads keep far more entries than streaming heads; both keep their sinks and their newest entries.

    In the paper retrieval heads grow without bound. Here streaming heads have a share of the mean budget, and retrieval
    heads the rest.
    """

    leaves: ClassVar[str] = "all but sinks and newest, in streaming heads"
    source: ClassVar[str] = "arXiv:2410.10819"
    across_heads: ClassVar[bool] = True
    files: ClassVar[Sequence[str]] = ("scores",)

    retrieval: float = 0.5
    """The share of KV heads that retrieve."""
    streaming: float = 0.25
    """The budget of a streaming head, as a share of the mean."""
    sinks: int = 4
    """First entries that stay."""
    scores: str = ""
    """A file of head scores, a row for each layer; by default they are measured on synthetic passkeys."""

    def __post_init__(self) -> None:
        if not (0 < self.retrieval <= 1 and 0 < self.streaming <= 1):
            raise UsageError("DuoAttention's 'retrieval' and 'streaming' are shares above 0 and up to 1.")

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return many entries for the heads with the highest scores and few for the others, ``entries`` on average."""
        layers = geometry.full_layers
        scores = torch.zeros(len(layers), layers[0].kv_heads)
        if self.scores or model is not None:
            scores = retrieval_scores(model, geometry, self.scores)
        heads = max(1, round(self.retrieval * scores.numel()))
        few = min(entries, max(2 * self.sinks, int(self.streaming * entries)))
        many = (entries * scores.numel() - few * (scores.numel() - heads)) // heads
        chosen = set(scores.flatten().topk(heads).indices.tolist())
        budgets: list[Sequence[int]] = [(entries,)] * len(geometry.layers)
        for number, layer in enumerate(geometry.full_layers):
            first = number * scores.shape[1]
            budgets[layer.index] = [many if first + head in chosen else few for head in range(scores.shape[1])]
        return budgets

    def rank(self, entries: Candidates) -> Tensor:
        return entries.slots.masked_fill(entries.slots < entries.first + self.sinks, 2**30)
