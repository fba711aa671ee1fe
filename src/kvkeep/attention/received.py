"""How much attention entries received, from the log-sum-exp of the attention that ran anyway.

Attention kernels return no weights, and asking for them (``output_attentions``) costs a matrix of all queries by all
entries. But the weight of one entry for one query is exp(score - lse), and the kernel does report lse. So only the
queries a selector asks for are multiplied with the keys again, a block at a time, and only sums are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.attend import Segment

BLOCK = 128
"""Queries whose weights stand in memory at once."""


def received(query: Tensor, segment: Segment, lse: Tensor, scaling: float, last: int | None = None) -> Tensor:
    """Return the weight each entry of ``segment`` got: summed over the ``last`` queries (None: all), mean over heads.

    query: (batch, heads, queries, key_dim) and lse: (batch, heads, queries) as :func:`attend` took and returned them,
    ``lse`` over everything that was attended; a query whose lse is inf counts nothing. Returns (batch, entries)
    float32, the batch being the segment's.
    """
    if segment.rows is not None:
        query, lse = query[segment.rows], lse[segment.rows]
    batch, heads, queries, _ = query.shape
    groups = segment.key.shape[1]
    keys = segment.key.flatten(0, 1).float().transpose(-1, -2)
    total: Tensor | None = None
    for low in range(max(0, queries - last) if last is not None else 0, queries, BLOCK):
        high = min(low + BLOCK, queries)
        block = query[:, :, low:high].reshape(batch * groups, -1, query.shape[-1]).float()
        bias = lse[:, :, low:high].reshape(batch * groups, -1, 1).neg()
        weights = torch.baddbmm(bias, block, keys, alpha=scaling).exp_()
        if segment.causal or segment.mask is not None:
            weights = weights.view(batch, heads, high - low, -1)
            weights *= _seen(segment, low, high, weights)
        part = weights.view(batch, -1, weights.shape[-1]).sum(1)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.div_(heads)


def _seen(segment: Segment, low: int, high: int, weights: Tensor) -> Tensor:
    """Return what the segment's mask multiplies the weights of queries ``low``..``high`` with."""
    if segment.mask is None:
        rows = torch.arange(low, high, device=weights.device)
        return torch.arange(weights.shape[-1], device=weights.device)[None, :] <= rows[:, None]
    mask = segment.mask if segment.mask.shape[-2] == 1 else segment.mask[..., low:high, :]
    return mask if mask.dtype == torch.bool else mask.float().exp()
