"""Attention that SDPA does not have: with sinks (gpt-oss), scores of each head that take a share of the softmax and
bring no value, and with capped scores (Gemma 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.step.native import attend_all
from kvkeep.step.plan import Segment
from kvkeep.step.scores import cap_of, scores_of
from kvkeep.step.torch import combined


def sinks_of(module: Any) -> Tensor | None:
    """Return the sinks of an attention module, (heads,) float32; None: it has none."""
    scores: Tensor | None = getattr(module, "sinks", None)
    return None if scores is None else scores.detach().float()


def attend_beyond_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor | None:
    """Return attention over all entries, (batch, heads, queries, value_dim), where SDPA would be wrong: of a module
    with sinks, or with capped scores; else None. query: (batch, heads, queries, dim); key, value: (batch, kv_heads,
    entries, dim), whose last ones are the queries'. mask: (batch or 1, 1, queries, entries), bool or additive; None:
    causal."""
    if (sinks := sinks_of(module)) is None and not cap_of(scaling):
        return None
    learned: Tensor | None = getattr(module, "sinks", None)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (query, key, value, learned)):
        return _differentiable(learned, query, key, value, _causal(query, key) if mask is None else mask, scaling)
    if (output := attend_all(query, [(key, value)], mask, scaling, 0, None, sinks)) is not None:
        return output
    square = mask is None and query.shape[2] == key.shape[2]
    if mask is None and not square:
        mask = _causal(query, key)
    return combined(query, [Segment(key, value, mask, causal=square)], scaling, sinks)[0].to(query.dtype)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    places = torch.arange(key.shape[2], device=key.device)
    return (places <= places[-query.shape[2] :, None])[None, None]


def _differentiable(
    sinks: Tensor | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Return the same in plain operations, for training. Masked scores are finite: a query of padding sees no entry,
    and -inf alone would give it, and then all gradients, NaN."""
    groups, least = query.shape[1] // key.shape[1], torch.finfo(torch.float32).min
    found = scores_of((query @ key.repeat_interleave(groups, 1).transpose(-1, -2)).float(), scaling)
    found = found.masked_fill(~mask, least) if mask.dtype == torch.bool else (found + mask).clamp(min=least)
    if sinks is not None:
        found = torch.cat((found, sinks.float().view(1, -1, 1, 1).expand(*found.shape[:3], 1)), -1)
    weights = found.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value.repeat_interleave(groups, 1)
