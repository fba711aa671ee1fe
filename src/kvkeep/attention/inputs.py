"""A step: the attention inputs of one layer in one forward pass, folded to lanes.

A *lane* is one KV head of one row of the batch: lane = row * kv_heads + head. Everything after a step is by lane: the
query heads that share a KV head are the heads of a lane, and a row that is padded masks its lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvkeep.step.plan import Segment
from kvkeep.step.sinks import sinks_of


@dataclass(frozen=True)
class AttentionInputs:
    """The attention of one layer over new entries and its past."""

    module: Any
    """The layer's attention module."""
    query: Tensor
    """(lanes, heads of the group, queries, key_dim)"""
    key: Tensor
    """(lanes, heads, new, key_dim), new entries only, as attention multiplies them."""
    value: Tensor
    """(lanes, heads, new, value_dim), new entries only."""
    mask: Tensor | None
    """(lanes or 1, 1, queries, entries), bool or additive, over the new entries, or over past and new ones; None:
    causal."""
    scaling: float
    """The factor of products with keys."""
    heads: int
    """KV heads of a row, as cached."""
    brings_entries: bool
    """The module writes the new entries; later modules may read them."""
    last: bool
    """The module is the last one that reads the new entries."""

    @classmethod
    def of(
        cls,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        heads: int,
        brings_entries: bool,
        last: bool,
    ) -> AttentionInputs:
        """Return the step of tensors (batch, heads, n, dim) and a mask (batch or 1, 1, queries, entries), folded."""
        if mask is not None and mask.shape[0] > 1:
            mask = mask.repeat_interleave(heads, 0)
        query, key, value = (part.reshape(-1, part.shape[1] // heads, *part.shape[2:]) for part in (query, key, value))
        return cls(module, query, key, value, mask, scaling, heads, brings_entries, last)

    @property
    def new(self) -> int:
        """Number of new entries."""
        return self.key.shape[2]

    @property
    def queries(self) -> int:
        """Number of queries of a head."""
        return self.query.shape[2]

    def unfolded(self, output: Tensor) -> Tensor:
        """Return an output (lanes, heads of the group, queries, dim) as (batch, heads, queries, dim)."""
        return output.reshape(-1, self.heads * output.shape[1], *output.shape[2:])

    def wide(self, past: int) -> Tensor | None:
        """Return the mask by lane, (lanes, 1, queries, past + new); None if it is not over ``past`` and new entries."""
        if self.mask is None or self.mask.shape[-1] == self.new or self.mask.shape[-1] != past + self.new:
            return None
        return self.mask.expand(len(self.query), -1, self.queries, -1)

    def arriving(self) -> Segment:
        """Return the new entries as a segment."""
        if self.mask is not None:
            return Segment(self.key, self.value, self.mask[..., -self.new :])
        if self.queries == self.new:
            return Segment(self.key, self.value, causal=True)
        # The queries are those of the last tokens.
        rows = torch.arange(self.new - self.queries, self.new, device=self.query.device)
        seen = torch.arange(self.new, device=self.query.device)[None, :] <= rows[:, None]
        return Segment(self.key, self.value, seen[None, None])

    def expanded(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return the keys and values that the module multiplies: latent attention (DeepSeek-V3) caches compressed
        latents and expands them at each step."""
        expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = getattr(self.module, "expand_kv", None)
        if expand is None:
            return keys, values
        if not isinstance(keys, Tensor):
            dtype = next(self.module.parameters()).dtype
            keys, values = keys.dense(dtype)[:, None], values.dense(dtype)[:, None]
        return expand(keys, values)

    @cached_property
    def sinks(self) -> Tensor | None:
        """The sinks of each head of a row (:func:`sinks_of`)."""
        return sinks_of(self.module)

    @property
    def latent(self) -> bool:
        """Whether the module caches latents and expands them."""
        return getattr(self.module, "expand_kv", None) is not None
