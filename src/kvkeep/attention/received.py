"""The attention that entries received, from the log-sum-exp of the attention kernel.

Attention kernels return no weights, and asking for them (``output_attentions``) costs a matrix of all queries by all
entries. But the weight of one entry for one query is exp(score - lse), and the kernel does report lse. So only the
queries in a selector's observation window are multiplied with the keys again, in blocks, and only sums are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.attention.attend import Segment, in_order, joins
from kvkeep.attention.kernel import Run

BLOCK = 128
"""Queries whose weights are in memory at once."""


def received(
    query: Tensor, segment: Segment, lse: Tensor, scaling: float, last: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Return the attention weight of each entry of ``segment``: the sum over the ``last`` queries (None: all), mean
    over heads; with ``reduce`` "max", the maximum over queries and heads.

    query: (batch, heads, queries, key_dim) and lse: (batch, heads, queries) as :func:`attend` took and returned them,
    ``lse`` over everything that was attended; a query whose lse is inf counts nothing. Returns (batch, entries)
    float32, the batch being the segment's.
    """
    if joins(query, segment):
        run = Run(query, scaling)
        run.add(*in_order(segment), segment.causal, False)
        received_by = run.received(lse, last, reduce == "max")
        return received_by if segment.lanes is None else received_by[segment.lanes]
    if segment.lanes is not None:
        query, lse = query[segment.lanes], lse[segment.lanes]
    batch, heads, queries, _ = query.shape
    groups = segment.key.shape[1]
    if segment.mask is not None:  # a query without visible entries has no weights
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    held = segment.key.flatten(0, 1) if isinstance(segment.key, Tensor) else segment.key.dense(torch.float32)
    keys = held.float().transpose(-1, -2)
    most = reduce == "max"
    total: Tensor | None = None
    for low in range(max(0, queries - last) if last is not None else 0, queries, BLOCK):
        high = min(low + BLOCK, queries)
        block = query[:, :, low:high].reshape(batch * groups, -1, query.shape[-1]).float()
        bias = lse[:, :, low:high].reshape(batch * groups, -1, 1).neg()
        scores = torch.baddbmm(bias, block, keys, alpha=scaling)
        if segment.causal or segment.mask is not None:
            scores = _masked(scores.view(batch, heads, high - low, -1), segment, low, high)
        weights = scores.exp_()
        rows = weights.view(batch, -1, weights.shape[-1])
        part = rows.amax(1) if most else rows.sum(1)
        total = part if total is None else torch.maximum(total, part) if most else total.add_(part)
    assert total is not None
    return total if most else total.div_(heads)


def _masked(scores: Tensor, segment: Segment, low: int, high: int) -> Tensor:
    """Apply the segment's mask of queries ``low``..``high``; before exp, which masked scores could overflow."""
    if segment.mask is None:
        rows = torch.arange(low, high, device=scores.device)
        return scores.masked_fill_(torch.arange(scores.shape[-1], device=scores.device) > rows[:, None], float("-inf"))
    mask = segment.mask if segment.mask.shape[-2] == 1 else segment.mask[..., low:high, :]
    return scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
