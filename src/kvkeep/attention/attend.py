"""``attend(query, segments)``: attention over keys and values in several segments.

Softmax attention over a set of keys can be taken over any partition of that set: with
``o_i``, ``lse_i`` the output and the log-sum-exp of the scores of part i,

    o = sum_i exp(lse_i - lse) o_i,    lse = log sum_i exp(lse_i)

FlashAttention (Dao et al., 2022) uses the same identity. So a page of recalled keys
can be rebuilt, used and freed, and the result is the attention over all pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvkeep.step import choice, native
from kvkeep.step import torch as plain
from kvkeep.step.plan import Segment


def attend(
    query: Tensor,
    segments: Iterable[Segment],
    scaling: float,
    sinks: Tensor | None = None,
    origin: Tensor | None = None,
    before: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention of ``query`` over the union of ``segments``, and the log-sum-exp of its scores.

    query: (batch, heads, queries, key_dim), heads a multiple of each segment's kv_heads (grouped
    queries: consecutive heads share a kv head). Returns (batch, heads, queries, value_dim) in the
    query's dtype, and (batch, heads, queries) float32. Partial results are combined in float32; a query that sees
    no entry gets zeros and -inf. Segments are consumed one at a time, so a generator holds only one of them.

    sinks: the model's, of each head of a row, (heads,) float32 (:func:`~kvkeep.step.sinks.sinks_of`). origin: (batch,)
    ints, the first entry of each row that is not padding. It is given where the segments are all entries in the order
    of the text. Kernels (:func:`~kvkeep.step.choice.kernels_of`) then compute the same bits for any padding and
    segments; the native library also for any chunk. before: output and log-sum-exp of entries already attended;
    neither is written.
    """
    output, lse = (None, None) if before is None else (before[0].to(torch.float32, copy=True), before[1].clone())
    kernels = choice.kernels_of(query.device)
    run = kernels.CollectedAttention(query, scaling, origin, sinks)
    for segment in segments:
        if segment.key.shape[-2] == 0:
            continue
        if kernels.can_join(query, segment):
            run.add(*kernels.in_order(segment), segment.causal, segment.formed)
            continue
        rows = segment.lanes
        part, part_lse = plain.partial(query if rows is None else query[rows], segment, scaling)
        if rows is not None:
            if output is None or lse is None:
                output = part.new_zeros(*query.shape[:-1], part.shape[-1])
                lse = part_lse.new_full(query.shape[:-1], float("-inf"))
            output[rows], lse[rows] = plain.merge(output[rows], lse[rows], part, part_lse)
        elif output is None or lse is None:
            output, lse = part, part_lse
        else:
            output, lse = plain.merge(output, lse, part, part_lse)
    if run:
        part, part_lse = run.output()
        output, lse = (part, part_lse) if output is None or lse is None else plain.merge(output, lse, part, part_lse)
    elif output is not None and lse is not None and sinks is not None:
        output, lse = plain.add_sinks(output, lse, sinks)
    if output is None or lse is None:
        raise ValueError("attend() needs at least one segment with an entry in it")
    return output.to(query.dtype), lse


def attend_scored(
    query: Tensor, segments: Sequence[Segment], scaling: float, reduce: str = "sum", sinks: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return attention of a single query over segments, and the weights of each segment's entries: the mean over heads,
    or with ``reduce`` "max" the maximum.

    query: (batch, heads, 1, key_dim). segments: tensors or codes, each for all rows. sinks: as in :func:`attend`.
    Returns (batch, heads, 1, value_dim), and for each segment (batch, entries) float32.
    """
    executor = native if all(native.can_join(query, segment) for segment in segments) else plain
    return executor.scored(query, segments, scaling, reduce, sinks)


def received(
    query: Tensor, segment: Segment, lse: Tensor, scaling: float, last: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Return the attention weight of each entry of ``segment``: the sum over the ``last`` queries (None: all), mean
    over heads; with ``reduce`` "max", the maximum over queries and heads.

    Attention kernels return no weights, but the weight of one entry for one query is exp(score - lse). So only the
    queries in a selector's observation window are multiplied with the keys again, and only sums are kept.

    query: (batch, heads, queries, key_dim), the argument of :func:`attend`. lse: (batch, heads, queries), its result,
    over all entries attended; a query whose lse is inf has the weight 0. Returns (batch, entries) float32, with the
    batch of the segment.
    """
    executor = native if native.can_join(query, segment) else plain
    return executor.received(query, segment, lse, scaling, last, reduce)
