"""``h2o-fisher``: H2O with more entries for layers whose keys and values matter more (KVReviver, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.selectors.h2o import H2O
from kvkeep_lab.published.fisher import information
from kvkeep_lab.published.score_file import numbers


@dataclass(frozen=True)
class H2OFisher(H2O):
    """As h2o; the Fisher information of W_k and W_v divides the budget between the layers."""

    leaves: ClassVar[str] = "as h2o; less informative layers keep fewer"
    source: ClassVar[str] = "KVReviver, appendix D"
    across_heads: ClassVar[bool] = True
    files: ClassVar[Sequence[str]] = ("scores",)

    least: float = 0.25
    """The share of the mean budget that every layer has. The rest is divided in proportion to the information."""
    scores: str = ""
    """A file of numbers, one for each layer; by default they are measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.least <= 1:
            raise UsageError(f"The least share of a layer ('least') is above 0 and at most 1, not {self.least:g}.")

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return ``least`` of the mean, plus a part of the rest in proportion to the information; rounded down."""
        layers = geometry.full_layers
        scores = torch.ones(len(layers), dtype=torch.float64)
        if self.scores:
            scores = self._read(len(layers))
        elif model is not None:
            scores = information(model, geometry)
        shares = scores * len(layers) / scores.sum()
        budgets: list[Sequence[int]] = [(entries,)] * len(geometry.layers)
        for layer, share in zip(layers, shares.tolist(), strict=True):
            budgets[layer.index] = (int(entries * (self.least + (1 - self.least) * share)),)
        return budgets

    def _read(self, layers: int) -> Tensor:
        scores = numbers(self.scores, 1).double()
        if scores.shape != (layers,) or not (scores >= 0).all() or not scores.sum() > 0:
            raise UsageError(
                f"'{self.scores}' must have a number of at least 0 for each of this model's {layers} layers."
            )
        return scores
