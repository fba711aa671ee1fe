"""A page of residuals that attention can read without their keys and values being written anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.attention import recall_attend
from kvkeep.memory.meter import Meter
from kvkeep.models.projection import Projection


@dataclass(frozen=True, slots=True)
class LazyPage:
    """One of attention's lazy entries: residuals ``hidden`` (batch, entries, hidden_size) entering a layer of weights
    ``projection``, and the ``angles`` of their positions, cosines and sines (batch or 1, entries, head_dim) each."""

    lazy: ClassVar[bool] = True

    projection: Projection
    hidden: Tensor
    angles: tuple[Tensor, Tensor]
    meter: Meter

    @property
    def shape(self) -> torch.Size:
        """Of the keys that this stands for: (lanes, 1, entries, head_dim)."""
        batch, entries, _ = self.hidden.shape
        return torch.Size((batch * self.projection.kv_heads, 1, entries, self.projection.head_dim))

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
        """Return attention of ``query`` (lanes, heads, queries, dim) over the page and its log-sum-exp; keys and
        values, where they are formed after all, count as workspace."""
        lanes, heads, queries, _ = query.shape
        kv_heads, batch = self.projection.kv_heads, len(self.hidden)
        if mask is not None and mask.shape[0] > 1:
            mask = mask[::kv_heads]  # lanes of a row see the same
        by_row = query.reshape(batch, kv_heads * heads, queries, -1)
        output, lse = recall_attend(
            by_row, self.hidden, self.projection, self.angles, scaling, mask, self.meter.holding
        )
        return output.reshape(lanes, heads, queries, -1), lse.reshape(lanes, heads, queries)
