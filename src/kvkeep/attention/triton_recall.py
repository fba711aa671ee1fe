"""The kernel: normalise, project, rotate, attend, in one pass over a page of residuals. Needs Triton.

For a residual h at position p the keys and values of one head are (KV-Direct, Eqs. 13-14)

    k = R_p RMSNorm(h) W_k,    v = RMSNorm(h) W_v,    RMSNorm(h) = h rsqrt(mean(h^2) + eps) (w + offset)

The norm without its weights is one factor for each residual, so it is applied after the products: sums of squares and
h (w W) are accumulated in one loop over the hidden axis. Keys and values of a block of entries stay in registers and
are attended with a running maximum and sum (online softmax); only each program's partial output and log-sum-exp are
written, which :func:`launch` combines by the identity of :mod:`kvkeep.attention.attend`.

One program is one row of the batch, one KV head and some blocks of entries, for all queries of the head's group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkeep.models.projection import Projection

ENTRIES = 64  # of a block
PROGRAMS = 256  # enough to fill a GPU; with more blocks a program takes several


@triton.jit
def _recall(
    query,  # (batch, kv_heads, rows, DIM), contiguous; rows: queries of all heads of the group
    hidden,  # (batch, entries, hidden_size)
    norm,
    key_weight,
    value_weight,
    key_bias,
    value_bias,
    key_norm,
    cos,
    sin,
    mask,  # (batch, 1, queries, entries), by strides
    output,  # (splits, batch, kv_heads, rows, DIM) float32
    lse,  # (splits, batch, kv_heads, rows) float32
    hidden_batch,
    hidden_entry,
    angle_batch,
    angle_entry,
    mask_batch,
    mask_query,
    mask_entry,
    entries,
    rows,
    queries,
    hidden_size,
    per_split,
    scale,  # of scores, times log2(e)
    offset,
    eps,
    key_eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2 and DIM, up to what a product can take
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STEP: tl.constexpr,  # of the loop over the hidden axis
    PRODUCT: tl.constexpr,  # dtype of products, after rounding to the model's
    PRECISION: tl.constexpr,  # of float32 products
    MASK: tl.constexpr,  # 0 none, 1 seen or not, 2 added
    KEY_BIAS: tl.constexpr,
    VALUE_BIAS: tl.constexpr,
    KEY_NORM: tl.constexpr,
):
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = batch * tl.num_programs(1) + head
    row, half, wide = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, WIDE)
    is_row, is_half, is_wide = row < rows, half < DIM // 2, wide < DIM
    # Products need multiples of 16: padding is zero.
    at_query = query + lane.to(tl.int64) * rows * DIM + row[:, None] * DIM + half[None, :]
    is_query = is_row[:, None] & is_half[None, :]
    query_low = tl.load(at_query, mask=is_query, other=0.0)
    query_high = tl.load(at_query + DIM // 2, mask=is_query, other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDE), tl.float32)

    first = split * per_split
    for start in range(first, tl.minimum(first + per_split, entries), ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        is_entry = entry < entries
        at_hidden = hidden + batch.to(tl.int64) * hidden_batch + entry.to(tl.int64)[:, None] * hidden_entry
        low = tl.zeros((ENTRIES, HALF), tl.float32)
        high = tl.zeros((ENTRIES, HALF), tl.float32)
        value = tl.zeros((ENTRIES, WIDE), tl.float32)
        squares = tl.zeros((ENTRIES,), tl.float32)
        for begin in range(0, hidden_size, STEP):
            column = begin + tl.arange(0, STEP)
            is_column = column < hidden_size
            residual = tl.load(at_hidden + column[None, :], mask=is_entry[:, None] & is_column[None, :], other=0.0)
            squares += tl.sum(residual.to(tl.float32) * residual.to(tl.float32), 1)
            # The norm's weight goes into the projection's, whose numbers are small: float16 has room for that.
            by = tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32) + offset
            at_key = key_weight + (head * DIM + half[None, :]) * hidden_size + column[:, None]
            is_key = is_column[:, None] & is_half[None, :]
            weight = tl.load(at_key, mask=is_key, other=0.0).to(tl.float32) * by[:, None]
            low = tl.dot(residual.to(PRODUCT), weight.to(residual.dtype).to(PRODUCT), low, input_precision=PRECISION)
            weight = tl.load(at_key + DIM // 2 * hidden_size, mask=is_key, other=0.0).to(tl.float32) * by[:, None]
            high = tl.dot(residual.to(PRODUCT), weight.to(residual.dtype).to(PRODUCT), high, input_precision=PRECISION)
            at_value = value_weight + (head * DIM + wide[None, :]) * hidden_size + column[:, None]
            is_value = is_column[:, None] & is_wide[None, :]
            weight = tl.load(at_value, mask=is_value, other=0.0).to(tl.float32) * by[:, None]
            value = tl.dot(
                residual.to(PRODUCT), weight.to(residual.dtype).to(PRODUCT), value, input_precision=PRECISION
            )
        scaled = 1.0 / tl.sqrt(squares / hidden_size + eps)
        low, high, value = low * scaled[:, None], high * scaled[:, None], value * scaled[:, None]
        if KEY_BIAS:
            low += tl.load(key_bias + head * DIM + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
            high += tl.load(key_bias + head * DIM + DIM // 2 + half, mask=is_half, other=0.0).to(tl.float32)[None, :]
        if VALUE_BIAS:
            value += tl.load(value_bias + head * DIM + wide, mask=is_wide, other=0.0).to(tl.float32)[None, :]
        if KEY_NORM:
            scaled = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + key_eps)
            by = tl.load(key_norm + half, mask=is_half, other=0.0).to(tl.float32) + offset
            low *= scaled[:, None] * by[None, :]
            by = tl.load(key_norm + DIM // 2 + half, mask=is_half, other=0.0).to(tl.float32) + offset
            high *= scaled[:, None] * by[None, :]
        # R_p: the first half of a head turns with the second.
        at_angle = batch * angle_batch + entry[:, None] * angle_entry + half[None, :]
        is_angle = is_entry[:, None] & is_half[None, :]
        cosine = tl.load(cos + at_angle, mask=is_angle, other=0.0).to(tl.float32)
        sine = tl.load(sin + at_angle, mask=is_angle, other=0.0).to(tl.float32)
        turned_low = low * cosine - high * sine
        cosine = tl.load(cos + at_angle + DIM // 2, mask=is_angle, other=0.0).to(tl.float32)
        sine = tl.load(sin + at_angle + DIM // 2, mask=is_angle, other=0.0).to(tl.float32)
        turned_high = high * cosine + low * sine

        turned_low = tl.trans(turned_low.to(query_low.dtype).to(PRODUCT))
        turned_high = tl.trans(turned_high.to(query_low.dtype).to(PRODUCT))
        scores = tl.dot(query_low.to(PRODUCT), turned_low, input_precision=PRECISION)
        scores = tl.dot(query_high.to(PRODUCT), turned_high, scores, input_precision=PRECISION) * scale
        if MASK:
            at_mask = batch * mask_batch + (row % queries)[:, None] * mask_query + entry[None, :] * mask_entry
            seen = tl.load(mask + at_mask, mask=is_row[:, None] & is_entry[None, :], other=0)
            if MASK == 1:
                scores = tl.where(seen != 0, scores, float("-inf"))
            else:
                scores += seen.to(tl.float32) * 1.4426950408889634
        scores = tl.where(is_entry[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row without a visible entry
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        weights = weights.to(query_low.dtype).to(PRODUCT)
        mixed = tl.dot(weights, value.to(query_low.dtype).to(PRODUCT), mixed, input_precision=PRECISION)
        top = higher

    some = total > 0.0
    mixed = mixed / tl.where(some, total, 1.0)[:, None]
    place = (split.to(tl.int64) * tl.num_programs(1) * tl.num_programs(2) + lane) * rows
    tl.store(output + (place + row)[:, None] * DIM + wide[None, :], mixed, mask=is_row[:, None] & is_wide[None, :])
    natural = (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
    tl.store(lse + place + row, tl.where(some, natural, float("-inf")), mask=is_row)


def settings(dtype: torch.dtype, dim: int, rows: int) -> dict[str, Any]:
    """Return the compile-time settings for a dtype, a head_dim and a number of query rows.

    Warps, stages and steps are chosen so that ptxas spills next to no registers and a block has room in the shared
    memory of an A100 and of a desktop card (99 KB); they have not been tuned on a GPU.
    """
    # The interpreter multiplies bfloat16 as if it were integers (Triton 3.9), so there all is widened.
    interpreted = not isinstance(_recall, triton.JITFunction)
    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    wide = dim > 64 or rows > 32 or dtype == torch.float32
    return {
        "DIM": dim,
        "HALF": max(16, triton.next_power_of_2(dim // 2)),
        "WIDE": max(16, triton.next_power_of_2(dim)),
        "ROWS": max(16, triton.next_power_of_2(rows)),
        "STEP": 32 if dim > 128 or dtype == torch.float32 else 64,
        "PRODUCT": tl.float32 if interpreted else types[dtype],
        "PRECISION": "tf32x3",  # float32 in three products of tensor cores, close to exact
        "num_warps": 8 if wide else 4,
        "num_stages": 2,
    }


def launch(
    query: Tensor,
    hidden: Tensor,
    projection: Projection,
    angles: tuple[Tensor, Tensor],
    scaling: float,
    mask: Tensor | None = None,
    *,
    block: int = ENTRIES,
    programs: int = PROGRAMS,
) -> tuple[Tensor, Tensor]:
    """Run the kernel and combine the results of its programs; arguments and result as of
    :func:`~kvkeep.attention.recall.recall_attend`. block: entries taken at a time, a power of two from 16 on; programs:
    how many to aim at."""
    batch, heads, queries, dim = query.shape
    entries, hidden_size = hidden.shape[1:]
    lanes, rows = projection.kv_heads, heads // projection.kv_heads * queries
    query, (cos, sin) = query.contiguous(), (part.expand(-1, entries, -1).contiguous() for part in angles)
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    blocks = triton.cdiv(entries, block)
    per_split = block * max(1, blocks * batch * lanes // programs)
    splits = triton.cdiv(entries, per_split)
    output = query.new_empty(splits, batch, heads, queries, dim, dtype=torch.float32)
    lse = query.new_empty(splits, batch, heads, queries, dtype=torch.float32)
    kind, seen = 0, query
    if mask is not None:
        seen = mask.expand(batch, 1, queries, entries)
        kind, seen = (1, seen.view(torch.uint8)) if mask.dtype == torch.bool else (2, seen)
    weights: Any = (projection.norm, projection.key, projection.value)
    optional = (projection.key_bias, projection.value_bias, projection.key_norm)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _recall[(splits, lanes, batch)](
            query,
            hidden,
            *weights,
            *(query if weight is None else weight for weight in optional),
            cos,
            sin,
            seen,
            output,
            lse,
            hidden.stride(0),
            hidden.stride(1),
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(1),
            *((0, 0, 0) if mask is None else (seen.stride(0), seen.stride(2), seen.stride(3))),
            entries,
            rows,
            queries,
            hidden_size,
            per_split,
            scaling * 1.4426950408889634,
            projection.offset,
            projection.eps,
            projection.key_eps,
            ENTRIES=block,
            MASK=kind,
            KEY_BIAS=projection.key_bias is not None,
            VALUE_BIAS=projection.value_bias is not None,
            KEY_NORM=projection.key_norm is not None,
            **settings(query.dtype, dim, rows),
        )
    if splits == 1:
        return output[0], lse[0]
    whole = lse.logsumexp(0)
    return (output * torch.exp(lse - whole).nan_to_num_(0.0).unsqueeze(-1)).sum(0), whole
