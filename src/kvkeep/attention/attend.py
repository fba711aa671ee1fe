"""``attend(query, segments)``: attention over keys and values in several segments.

Softmax attention over a set of keys can be taken over any partition of that set: with
``o_i``, ``lse_i`` the output and the log-sum-exp of the scores of part i,

    o = sum_i exp(lse_i - lse) o_i,    lse = log sum_i exp(lse_i)

which is the identity FlashAttention (Dao et al., 2022) is built on. So a page of recalled keys
can be rebuilt, used and freed, and the result is the attention over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvkeep.attention.described import Stretch, grouped
from kvkeep.attention.kernel import Run, runs

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


FOLDED = 8
"""Most queries for which codes are multiplied directly; for more, decoding them first is cheaper."""


class Coded(Protocol):
    """Coded keys or values with products of their own. layout: what the kernel
    reads, "grouped" (stores/coded.py: codes, scale and offset of 32 entries), "by channel" (stores/waiting.py: codes of
    entries) or "sketched" (stores/sketch.py: places in cells); empty: it does not."""

    layout: ClassVar[str]

    def scores(self, query: Tensor) -> Tensor:
        """Return the products of keys with ``query`` (batch, rows, dim): (batch, rows, entries) float32."""

    def mix(self, weights: Tensor) -> Tensor:
        """Return the sums of values weighted by ``weights`` (batch, rows, entries): (batch, rows, dim) float32."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Decode them: (batch, entries, dim)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Some keys and values, and which queries see which of them.

    key: (batch, kv_heads, entries, key_dim); value: (batch, kv_heads, entries, value_dim). Either tensors, or both
    :class:`Coded`, of one kv head. mask: None (every query sees every entry), or bool
    (True = seen) or additive float, broadcastable to (batch, 1, queries, entries). causal: query i sees entries 0..i;
    needs as many entries as queries, and no mask. lanes: the rows of the query's batch that read this segment, (its
    batch,) int64; None: all of them. shared: one copy for several rows: of a query's batch, row r reads row r mod (the
    segment's batch). formed: key and value were made for this attention and are kept nowhere else.
    """

    key: Any
    value: Any
    mask: Tensor | None = None
    causal: bool = False
    lanes: Tensor | None = None
    shared: bool = False
    formed: bool = False


def attend(
    query: Tensor,
    segments: Iterable[Segment],
    scaling: float,
    before: tuple[Tensor, Tensor] | None = None,
    origin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention of ``query`` over the union of ``segments``, and the log-sum-exp of its scores.

    query: (batch, heads, queries, key_dim), heads a multiple of each segment's kv_heads (grouped
    queries: consecutive heads share a kv head). Returns (batch, heads, queries, value_dim) in the
    query's dtype, and (batch, heads, queries) float32. Partial results are combined in float32; a query that sees
    no entry gets zeros and -inf. Segments are consumed one at a time, so a generator holds only one of them.
    ``before``: output and log-sum-exp of entries already attended. origin: (batch,) ints, the first entry of each row
    that is not padding, where segments are all entries in the order of the text: by the kernel (:mod:`.kernel`), the
    result then has the same bits for any padding, chunk and segments.
    """
    output, lse = (None, None) if before is None else (before[0].to(torch.float32, copy=True), before[1])
    run = Run(query, scaling, origin)
    for segment in segments:
        if segment.key.shape[-2] == 0:
            continue
        if joins(query, segment):
            run.add(*in_order(segment), segment.causal, segment.formed)
            continue
        rows = segment.lanes
        if segment.shared:
            part, part_lse = _shared(query, segment, scaling)
        else:
            part, part_lse = partial(query if rows is None else query[rows], segment, scaling)
        if rows is not None:
            if output is None or lse is None:
                output = part.new_zeros(*query.shape[:-1], part.shape[-1])
                lse = part_lse.new_full(query.shape[:-1], float("-inf"))
            output[rows], lse[rows] = _merge(output[rows], lse[rows], part, part_lse)
        elif output is None or lse is None:
            output, lse = part, part_lse
        else:
            output, lse = _merge(output, lse, part, part_lse)
    if run:
        part, part_lse = run.output()
        output, lse = (part, part_lse) if output is None or lse is None else _merge(output, lse, part, part_lse)
    if output is None or lse is None:
        raise ValueError("attend() needs at least one segment with an entry in it")
    return output.to(query.dtype), lse


def joins(query: Tensor, segment: Segment) -> bool:
    """Return whether the kernel attends to a segment together with others."""
    mask, lanes = segment.mask, segment.lanes
    return (
        runs(query, segment.key, segment.value)
        and segment.key.shape[1] == 1
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
        and (lanes is None or (len(lanes) == len(query) and isinstance(segment.key, Tensor)))
        and not (segment.shared and mask is not None)
    )


def in_order(segment: Segment) -> tuple[Any, Any, Tensor | None]:
    """Return keys, values and mask of a segment without the axis of heads, of all lanes in order."""
    mask = None if segment.mask is None else segment.mask[:, 0]
    if not isinstance(segment.key, Tensor):
        return segment.key, segment.value, mask
    key, value = segment.key[:, 0], segment.value[:, 0]
    if segment.lanes is None:
        return key, value, mask
    order = segment.lanes.argsort()
    return key[order], value[order], mask if mask is None or len(mask) == 1 else mask[order]


def _shared(query: Tensor, segment: Segment, scaling: float) -> tuple[Tensor, Tensor]:
    """The same as :func:`partial` for a shared segment: rows that read the same keys become heads of one row."""
    (batch, heads, queries, _), own = query.shape, segment.key.shape[0]
    rows = batch // own
    folded = query.unflatten(0, (rows, own)).transpose(0, 1).flatten(1, 2)  # (own, rows * heads, queries, dim)
    mask = segment.mask
    if mask is not None:  # a mask a row, (batch, 1, queries or 1, entries)
        mask = mask.expand(-1, heads, queries, -1).unflatten(0, (rows, own)).transpose(0, 1).flatten(1, 2)
    output, lse = partial(folded, Segment(segment.key, segment.value, mask), scaling)
    output, lse = (part.unflatten(1, (rows, heads)).transpose(0, 1).flatten(0, 1) for part in (output, lse))
    return output, lse


def weighed(
    query: Tensor, segments: Sequence[Segment], scaling: float, reduce: str = "sum"
) -> tuple[Tensor, list[Tensor]]:
    """Return attention of a single query over segments, and the weights of each segment's entries: the mean over heads,
    or with ``reduce`` "max" the maximum.

    query: (batch, heads, 1, key_dim). segments: of all rows, tensors or codes. Returns (batch, heads, 1, value_dim) and
    (batch, entries) float32 each. Torch's kernels report no weights; for one query plain products are as fast and do.
    """
    if all(joins(query, segment) for segment in segments):
        run = Run(query, scaling)
        groups_first = sorted(range(len(segments)), key=lambda number: not grouped(segments[number].key))
        for number in groups_first:
            run.add(*in_order(segments[number]), False, False)
        output, received = run.weighed(reduce == "max")
        parts = received.split([segments[number].key.shape[-2] for number in groups_first], 1)
        return output.to(query.dtype), [parts[groups_first.index(number)] for number in range(len(segments))]
    scored = [_scored(query, segment, scaling) for segment in segments]
    weights = torch.softmax(scored[0] if len(scored) == 1 else torch.cat(scored, -1), -1)
    if any(segment.mask is not None for segment in segments):
        weights.nan_to_num_(0.0)  # of a query that sees no entry
    shares = weights.split([scores.shape[-1] for scores in scored], -1)
    output = _mixed(shares[0], segments[0])
    for share, segment in zip(shares[1:], segments[1:], strict=True):
        output = output + _mixed(share, segment)
    return output.to(query.dtype), [
        (share.amax(1) if reduce == "max" else share.mean(1)).squeeze(1) for share in shares
    ]


def _scored(query: Tensor, segment: Segment, scaling: float) -> Tensor:
    """Return the scores of a single query, (batch, heads, 1, entries) float32, masked."""
    batch, heads, _, dim = query.shape
    if isinstance(segment.key, Tensor):
        key = segment.key.flatten(0, 1)
        scores = torch.bmm(query.reshape(len(key), -1, dim), key.transpose(1, 2)).float()
    else:
        scores = segment.key.scores(query.squeeze(2))
    scores = scores.mul_(scaling).view(batch, heads, 1, -1)
    if segment.mask is None:
        return scores
    if segment.mask.dtype == torch.bool:
        return scores.masked_fill_(~segment.mask, float("-inf"))
    return scores + segment.mask


def _mixed(weights: Tensor, segment: Segment) -> Tensor:
    """Return values mixed by ``weights`` (batch, heads, 1, entries): (batch, heads, 1, value_dim)."""
    batch, heads = weights.shape[:2]
    if not isinstance(segment.value, Tensor):
        return segment.value.mix(weights.squeeze(2)).unsqueeze(2)
    value = segment.value.flatten(0, 1)
    own = weights.reshape(len(value), -1, weights.shape[-1]).to(value.dtype)
    return torch.bmm(own, value).view(batch, heads, 1, -1)


def _merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial results, in the memory of the first; outputs (batch, heads, queries, dim) float32, lse
    without the last axis."""
    lse = torch.logaddexp(lse_a, lse_b)
    # Where a query saw nothing in either part both are -inf and the difference is nan: weigh with 0.
    weight_a = torch.exp(lse_a - lse).nan_to_num_(0.0).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).nan_to_num_(0.0).unsqueeze(-1)
    return a.mul_(weight_a).addcmul_(b, weight_b), lse


def partial(query: Tensor, segment: Segment, scaling: float) -> tuple[Tensor, Tensor]:
    """Return attention over one segment, (batch, heads, queries, value_dim) float32, and the log-sum-exp of its scores,
    (batch, heads, queries) float32."""
    batch, heads, queries, _ = query.shape
    key, value, mask = segment.key, segment.value, segment.mask
    if not isinstance(key, Tensor):
        if queries <= FOLDED and not isinstance(key, Stretch):
            output, lse = _folded(query, key, value, mask, scaling)
            return output.reshape(batch, heads, queries, -1), lse.reshape(batch, heads, queries)
        key, value = key.dense(query.dtype)[:, None], value.dense(query.dtype)[:, None]
    groups = heads // key.shape[1]
    causal = segment.causal and queries > 1
    if causal:
        # The causal flag of the kernel is per head: keys are repeated rather than queries packed.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    else:
        # Queries of one kv head are stacked as rows, so shared keys are read once, in place.
        query = query.reshape(batch, key.shape[1], groups * queries, query.shape[-1])
        if mask is not None and mask.shape[1] > 1:  # a mask a head
            mask = mask.reshape(batch, key.shape[1], groups * queries, -1)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask.repeat(1, 1, groups, 1)
    if query.device.type == "cpu" and key.shape[-1] == value.shape[-1]:
        bias = mask if mask is None or mask.dtype != torch.bool else _bias(mask, query.dtype)
        output, lse = _flash_cpu(query, key, value, 0.0, causal, attn_mask=bias, scale=scaling)
        if mask is not None:  # the kernel reports 0 for a row that sees nothing
            lse = lse.masked_fill(_blind(mask), float("-inf"))
    else:
        output, lse = _plain(query, key, value, mask, causal, scaling)
    return output.reshape(batch, heads, queries, -1).float(), lse.reshape(batch, heads, queries)


def _folded(query: Tensor, key: Coded, value: Coded, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """The same for coded keys and values."""
    batch, heads, queries, dim = query.shape
    scores = key.scores(query.reshape(batch, heads * queries, dim)) * scaling
    if mask is not None:
        bias = _bias(mask, scores.dtype) if mask.dtype == torch.bool else mask.float()
        scores = (scores.view(batch, heads, queries, -1) + bias).flatten(1, 2)
    lse = scores.logsumexp(-1)
    return value.mix(torch.exp(scores - lse.unsqueeze(-1)).nan_to_num_(0.0)), lse


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """The same in plain tensor operations, for devices and shapes without a kernel that reports lse."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scaling
    if causal:
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores + (_bias(mask, scores.dtype) if mask.dtype == torch.bool else mask)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num_(0.0)
    return torch.matmul(weights.to(value.dtype), value), lse


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as an additive one."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _blind(mask: Tensor) -> Tensor:
    """Return the rows of a mask that see no entry: (batch, 1, rows)."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return ~seen.any(-1)
