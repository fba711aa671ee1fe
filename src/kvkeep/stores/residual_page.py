"""A page of residuals that attention can read without their keys and values being written anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.attention import recall_attend
from kvkeep.models.projection import Projection
from kvkeep.stores.meter import Meter


@dataclass(frozen=True, slots=True)
class ResidualPage:
    """One of attention's Unformed: residuals ``hidden`` (batch, entries, hidden_size) entering a layer of weights
    ``projection``, and the ``angles`` of their positions, cosines and sines (batch or 1, entries, head_dim) each."""

    projection: Projection
    hidden: Tensor
    angles: tuple[Tensor, Tensor]
    meter: Meter

    @property
    def shape(self) -> torch.Size:
        """Of the keys that this stands for: (batch, kv_heads, entries, head_dim)."""
        batch, entries, _ = self.hidden.shape
        return torch.Size((batch, self.projection.kv_heads, entries, self.projection.head_dim))

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
        """Return attention over the page and its log-sum-exp; keys and values, where they are formed after all, count
        as workspace."""
        return recall_attend(query, self.hidden, self.projection, self.angles, scaling, mask, self.meter.holding)
