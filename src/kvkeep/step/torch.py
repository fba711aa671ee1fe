"""Executes steps by plain tensor operations, on any device: the fallback, and the reference for the native executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.step.checks import check, check_lanes
from kvkeep.step.plan import Coded, LayerStep, Segment, Writes
from kvkeep.step.products import flash, operand, product
from kvkeep.step.scores import cap_of, scores_of

MAX_CODED_QUERIES = 8
"""The maximum number of queries for which codes are multiplied directly; for more, decoding the codes first is cheaper.
"""
BLOCK = 128
"""The number of queries whose weights are in memory at the same time."""
MAX_SCORES = 2**28
"""The number of scores that are in a GPU's memory at the same time: 1 GiB of them."""
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


# -- a planned step -------------------------------------------------------------------------------------


def insert(step: LayerStep, keys: Tensor, values: Tensor) -> None:
    """Write the new entry of each lane, keys and values (lanes, dim), and copy the one that it evicts.
    Raises BadCall where the step does not fit its tensors."""
    bank = check(step)
    if (keys.shape, values.shape) != tuple((bank.lanes, width) for width in bank.widths):
        raise BadCall("new entries must have the width of a bank's rows, one for each lane")
    write(step, keys[:, None], values[:, None], Writes())


def wrote(step: LayerStep, writes: Writes) -> bool:
    """Return whether the entry that a step evicts is copied. Its place may then have the new one."""
    return all(id(part) in writes.steps for part in step.parts)


def write(step: LayerStep, keys: Tensor, values: Tensor, writes: Writes) -> None:
    """Write the new entries of each lane, keys and values (lanes, tokens, dim)."""
    append, evict, ranks = step.append, step.evict, step.ranks
    own_keys, own_values = append.keys.flatten(0, -3), append.values.flatten(0, -3)
    lane, later = (torch.arange(count, device=own_keys.device) for count in (len(own_keys), step.tokens))
    row = later + (append.row if step.place is None else step.place)
    if ranks is not None:
        assert append.slots is not None
        slots = append.slots
        lowest = float("-inf") if ranks.is_floating_point() else torch.iinfo(ranks.dtype).min
        ranks = ranks.masked_fill(slots < 0, lowest)
        if step.oldest:
            ranks = torch.where(ranks == ranks.amin(1, keepdim=True), slots, 2**31 - 1)
        row = ranks.argmin(1, keepdim=True)
    place = lane[:, None], row  # (lanes, tokens)
    beside = ("slots", "scores", "extra", "newest")
    if evict is not None:
        rows, leaving = slice(evict.row, evict.row + step.evicts), (lane[:, None], row[..., -step.evicts :])
        evict.keys[..., rows, :], evict.values[..., rows, :] = own_keys[leaving], own_values[leaving]
        for name in beside:
            if (target := getattr(evict, name)) is not None:
                target[:] = getattr(append, name)[place]
    writes.steps.add(id(step))
    own_keys[place], own_values[place] = keys, values
    fresh = (step.slot + later.int(), 0.0 if step.new_scores is None else step.new_scores[:, None], 0.0, 0)
    for name, new in zip(beside, fresh, strict=True):
        if (target := getattr(append, name)) is not None:
            target[place] = new


def run(
    steps: Sequence[LayerStep],
    tokens: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sinks: Tensor | None = None,
    writes: Writes | None = None,
) -> Tensor:
    """Run one layer for the next tokens of each of several sessions: write their entries, and return their attention,
    (1, row, heads, value_dim). Places of the row without such a token get 0.

    steps, tokens: the step of each session, and its first token's place in the row. query: (1, heads, row, dim). key,
    value: (1, kv_heads, row, dim). sinks: of each head, (heads,) float32. writes: notes which steps have written.
    Raises BadCall where a step does not fit its tensors.
    """
    writes = writes or Writes()
    for one, token in zip(steps, tokens, strict=True):
        check_lanes(one.parts, [check(part) for part in one.parts], (key.shape[1], key.shape[3], value.shape[3]))
        if not 0 <= token <= query.shape[2] - one.tokens:
            raise BadCall("the tokens of a step must be some of the call")
    output = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    for step, token in ((part, token) for one, token in zip(steps, tokens, strict=True) for part in one.parts):
        lanes_here = slice(step.first_lane, step.first_lane + step.append.keys.shape[-3])
        here = slice(token, token + step.tokens)
        write(step, key[0, lanes_here, here], value[0, lanes_here, here], writes)
        grouped = query[0, :, here].unflatten(0, (key.shape[1], -1))[lanes_here]
        segments = step.segments()
        own_sinks = None if sinks is None else sinks.unflatten(0, (key.shape[1], -1))[lanes_here].flatten()
        if step.reduce:
            assert step.received is not None
            found, received = scored(grouped, segments, scaling, step.reduce, own_sinks)
            torch.cat(received, 1, out=step.received)
        else:
            found = combined(grouped, segments, scaling, own_sinks)[0].to(query.dtype)
        output[0, here].unflatten(1, (key.shape[1], -1))[:, lanes_here] = found.permute(2, 0, 1, 3)
    return output


# -- attention over segments ----------------------------------------------------------------------------


def combined(
    query: Tensor, segments: Sequence[Segment], scaling: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention over the union of segments of all lanes, float32, and its log-sum-exp. sinks: of each head of a
    row, (heads,) float32."""
    output, lse = partial(query, segments[0], scaling)
    for segment in segments[1:]:
        output, lse = merge(output, lse, *partial(query, segment, scaling))
    return (output, lse) if sinks is None else add_sinks(output, lse, sinks)


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Combine a partial result, (lanes, heads, queries, dim) float32, with sinks, in its memory."""
    return merge(output, lse, output.new_zeros(1), sink_scores(sinks, output).squeeze(-1))


def sink_scores(sinks: Tensor, query: Tensor) -> Tensor:
    """Return the sinks of each head of a row, (heads of a row,), as scores, (lanes, heads, queries, 1). query: (lanes,
    heads, queries, dim)."""
    lanes, heads, queries, _ = query.shape
    by_lane = sinks.view(-1, heads)
    return by_lane.repeat(lanes // len(by_lane), 1)[..., None, None].expand(-1, -1, queries, -1)


def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial results, in the memory of the first. a, b: outputs (batch, heads, queries, dim) float32.
    lse_a, lse_b: (batch, heads, queries)."""
    lse = torch.logaddexp(lse_a, lse_b)
    # If a query sees no entry in both parts, both are -inf and the difference is nan. Its weight is 0.
    weight_a = torch.exp(lse_a - lse).nan_to_num_(0.0).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).nan_to_num_(0.0).unsqueeze(-1)
    return a.mul_(weight_a).addcmul_(b, weight_b), lse


def partial(query: Tensor, segment: Segment, scaling: float) -> tuple[Tensor, Tensor]:
    """Return attention over one segment, (batch, heads, queries, value_dim) float32, and the log-sum-exp of its scores,
    (batch, heads, queries) float32."""
    batch, heads, queries, _ = query.shape
    key, value, mask = segment.key, segment.value, segment.mask
    if not key.shape[-2]:  # for which torch's kernel divides by zero
        nothing = query.new_zeros(batch, heads, queries, value.shape[-1], dtype=torch.float32)
        return nothing, nothing.new_full((batch, heads, queries), float("-inf"))
    if not isinstance(key, Tensor):
        if queries <= MAX_CODED_QUERIES and key.layout != "spans":
            output, lse = _folded(query, key, value, mask, scaling)
            return output.reshape(batch, heads, queries, -1), lse.reshape(batch, heads, queries)
        key, value = key.dense(query.dtype)[:, None], value.dense(query.dtype)[:, None]
    causal = segment.causal and queries > 1
    plain = not cap_of(scaling)  # torch's kernels cap no scores
    if plain and mask is None and (found := flash(query, key, value, causal, scaling)) is not None:
        return found
    groups = heads // key.shape[1]
    by_kernel = plain and query.device.type == "cpu" and key.shape[-1] == value.shape[-1]
    if causal and by_kernel:
        # The kernel's causal flag applies per head, so keys are repeated instead of stacking queries.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    else:
        # Queries of one KV head are stacked as rows, so that shared keys are read once, in place.
        query = query.reshape(batch, key.shape[1], groups * queries, query.shape[-1])
        if causal:
            mask = torch.ones(1, 1, queries, queries, dtype=torch.bool, device=query.device).tril()
        if mask is not None and mask.shape[1] > 1:  # one mask per head
            mask = mask.reshape(batch, key.shape[1], groups * queries, -1)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask.repeat(1, 1, groups, 1)
    if by_kernel:
        bias = mask if mask is None or mask.dtype != torch.bool else _bias(mask, query.dtype)
        output, lse = _flash_cpu(query, key, value, 0.0, causal, attn_mask=bias, scale=scaling)
        if mask is not None:  # the kernel reports 0 for a row without visible entries
            lse = lse.masked_fill(_blind(mask), float("-inf"))
    else:
        output, lse = _by_products(query, key, value, mask, scaling)
    return output.reshape(batch, heads, queries, -1).float(), lse.reshape(batch, heads, queries)


def _folded(query: Tensor, key: Coded, value: Coded, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`partial` for coded keys and values."""
    batch, heads, queries, dim = query.shape
    found = scores_of(key.scores(query.reshape(batch, heads * queries, dim)), scaling)
    if mask is not None:
        bias = _bias(mask, found.dtype) if mask.dtype == torch.bool else mask.float()
        found = (found.view(batch, heads, queries, -1) + bias).flatten(1, 2)
    lse = found.logsumexp(-1)
    return value.mix(torch.exp(found - lse.unsqueeze(-1)).nan_to_num_(0.0)), lse


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`partial` by two products, for devices and shapes without a kernel that reports lse.
    query: (batch, kv_heads, rows, dim)."""
    batch, heads, rows, _ = query.shape
    at_once = max(1, MAX_SCORES // (batch * heads * key.shape[2]))
    if rows > at_once and query.device.type != "cpu":  # where a chunk may be long, and is not read by a kernel
        done = []
        for part in (slice(start, start + at_once) for start in range(0, rows, at_once)):
            masked = mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]
            done.append(_by_products(query[:, :, part], key, value, masked, scaling))
        return torch.cat([output for output, _ in done], 2), torch.cat([lse for _, lse in done], 2)
    products = product(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    found = scores_of(products, scaling).view(*query.shape[:3], -1)
    if mask is not None:
        found = found.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else found.add_(mask)
    lse = found.logsumexp(-1)
    weights = found.sub_(lse.unsqueeze(-1)).exp_().nan_to_num_(0.0).to(value.dtype)
    return product(weights.flatten(0, 1), value.flatten(0, 1)).view(*query.shape[:3], -1), lse


# -- the attention that entries receive ----------------------------------------------------------------


def scored(
    query: Tensor, segments: Sequence[Segment], scaling: float, reduce: str, sinks: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return attention of a single query over segments, and the weights of each segment's entries, as
    :func:`kvkeep.attention.attend_scored`."""
    found = [_scores(query, segment, scaling) for segment in segments]
    parts = found if sinks is None else [*found, sink_scores(sinks, query)]
    weights = torch.softmax(parts[0] if len(parts) == 1 else torch.cat(parts, -1), -1)
    if any(segment.mask is not None for segment in segments):
        weights.nan_to_num_(0.0)  # a query may see no entry
    shares = weights.split([part.shape[-1] for part in parts], -1)[: len(found)]
    output = _mixed(shares[0], segments[0])
    for share, segment in zip(shares[1:], segments[1:], strict=True):
        output = output + _mixed(share, segment)
    return output.to(query.dtype), [
        (share.amax(1) if reduce == "max" else share.mean(1)).squeeze(1) for share in shares
    ]


def _scores(query: Tensor, segment: Segment, scaling: float) -> Tensor:
    """Return the scores of a single query, (batch, heads, 1, entries) float32, masked."""
    batch, heads, _, dim = query.shape
    if isinstance(segment.key, Tensor):
        key = segment.key.flatten(0, 1)
        products = product(query.reshape(len(key), -1, dim), key.transpose(1, 2))
    else:
        products = segment.key.scores(query.squeeze(2))
    found = scores_of(products, scaling).view(batch, heads, 1, -1)
    if segment.mask is None:
        return found
    if segment.mask.dtype == torch.bool:
        return found.masked_fill_(~segment.mask, float("-inf"))
    return found + segment.mask


def _mixed(weights: Tensor, segment: Segment) -> Tensor:
    """Return values mixed by ``weights`` (batch, heads, 1, entries): (batch, heads, 1, value_dim) float32."""
    batch, heads = weights.shape[:2]
    if not isinstance(segment.value, Tensor):
        return segment.value.mix(weights.squeeze(2)).unsqueeze(2)
    value = segment.value.flatten(0, 1)
    flat = weights.reshape(len(value), batch * heads // len(value), weights.shape[-1]).to(value.dtype)
    return product(flat, value).view(batch, heads, 1, -1)


def received(
    query: Tensor, segment: Segment, lse: Tensor, scaling: float, last: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Return the attention that each entry of a segment received, as :func:`kvkeep.attention.received`."""
    if segment.lanes is not None:
        query, lse = query[segment.lanes], lse[segment.lanes]
    batch, heads, queries, _ = query.shape
    groups = segment.key.shape[1]
    if segment.mask is not None:  # a query without visible entries has no weights
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dense = segment.key.flatten(0, 1) if isinstance(segment.key, Tensor) else segment.key.dense(torch.float32)
    keys = operand(dense).transpose(-1, -2)
    greatest = reduce == "max"
    total: Tensor | None = None
    for low in range(max(0, queries - last) if last is not None else 0, queries, BLOCK):
        high = min(low + BLOCK, queries)
        block = query[:, :, low:high].reshape(batch * groups, -1, query.shape[-1]).to(keys.dtype)
        bias = lse[:, :, low:high].reshape(batch * groups, -1, 1)
        found = scores_of(product(block, keys), scaling).sub_(bias)
        if segment.causal or segment.mask is not None:
            found = _masked(found.view(batch, heads, high - low, -1), segment, low, high)
        weights = found.exp_()
        rows = weights.view(batch, -1, weights.shape[-1])
        part = rows.amax(1) if greatest else rows.sum(1)
        total = part if total is None else torch.maximum(total, part) if greatest else total.add_(part)
    assert total is not None
    return total if greatest else total.div_(heads)


def _masked(found: Tensor, segment: Segment, low: int, high: int) -> Tensor:
    """Apply the segment's mask of queries ``low``..``high`` to their scores; before exp, which masked ones could
    overflow."""
    if segment.mask is None:
        rows = torch.arange(low, high, device=found.device)
        return found.masked_fill_(torch.arange(found.shape[-1], device=found.device) > rows[:, None], float("-inf"))
    mask = segment.mask if segment.mask.shape[-2] == 1 else segment.mask[..., low:high, :]
    return found.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else found + mask


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as an additive one."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _blind(mask: Tensor) -> Tensor:
    """Return the rows of a mask that see no entry: (batch, 1, rows)."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return ~seen.any(-1)
