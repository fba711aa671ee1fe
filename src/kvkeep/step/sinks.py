"""Attention sinks of a model (gpt-oss): scores of each head that take a share of the softmax and bring no value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.step.plan import Segment
from kvkeep.step.torch import merge, partial


def sinks_of(module: Any, query: Tensor, value_dim: int) -> tuple[Tensor, Tensor] | None:
    """Return what attention begins with where a module has sinks: scores of each head that take
    a share of the softmax and bring no value (gpt-oss). None: it has none.

    query: (lanes, heads of the group, queries, key_dim), or (batch, heads, queries, key_dim). The output before any
    entry is zeros, (..., queries, value_dim), and its log-sum-exp the scores, (..., queries), both float32."""
    scores: Tensor | None = getattr(module, "sinks", None)
    if scores is None:
        return None
    lanes, heads, queries, _ = query.shape
    scores = scores.detach().float().view(-1, heads)
    scores = scores.repeat(lanes // len(scores), 1)[..., None].expand(lanes, heads, queries)
    return query.new_zeros(lanes, heads, queries, value_dim, dtype=torch.float32), scores


def attend_with_sinks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor | None:
    """Return attention over all entries, (batch, heads, queries, value_dim), where SDPA, which has no sinks, would be
    wrong; None for a module without sinks. query: (batch, heads, queries, dim); key, value: (batch, kv_heads, entries,
    dim), whose last ones are the queries'. mask: (batch or 1, 1, queries, entries), bool or additive; None: causal."""
    before = sinks_of(module, query, value.shape[-1])
    if before is None:
        return None
    if mask is None:
        places = torch.arange(key.shape[2], device=key.device)
        mask = (places <= places[-query.shape[2] :, None])[None, None]
    return merge(*before, *partial(query, Segment(key, value, mask), scaling))[0].to(query.dtype)
