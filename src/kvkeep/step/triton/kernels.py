"""The kernels of a GPU, in Triton. Their numbers come in tables of int64 (:mod:`kvkeep.step.triton.tables`).

One program attends for a tile of queries of one lane. The number of rows of a tile is fixed, whatever the number of
queries, because other shapes of a matrix product may add in another order. Nothing that says where entries lie is a
constant of the compiler, so all places are read by the same code. Fusing of products and sums is switched off, so that
each sum is rounded alone, wherever the compiler inlines it.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_ENTRIES = 512
"""Entries whose attention is one partial result."""
TILE_ENTRIES = 64
"""Entries whose scores are in registers at the same time; a block has whole tiles."""
COMBINED = 8
"""Partial results that are loaded together."""

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton interprets the kernels in Python, on tensors in host memory: TRITON_INTERPRET was 1 at the import."""

_BLOCK: tl.constexpr = tl.constexpr(BLOCK_ENTRIES)
_BLOCK_BITS: tl.constexpr = tl.constexpr(BLOCK_ENTRIES.bit_length() - 1)
_TILE: tl.constexpr = tl.constexpr(TILE_ENTRIES)
_COMBINED: tl.constexpr = tl.constexpr(COMBINED)

# Fields of a piece: rows of keys and values. Addresses and strides are in bytes.
P_KEYS: tl.constexpr = tl.constexpr(0)
P_VALUES: tl.constexpr = tl.constexpr(1)
P_KEY_ROW: tl.constexpr = tl.constexpr(2)
P_VALUE_ROW: tl.constexpr = tl.constexpr(3)
P_KEY_LANE: tl.constexpr = tl.constexpr(4)
P_VALUE_LANE: tl.constexpr = tl.constexpr(5)
P_LANES: tl.constexpr = tl.constexpr(6)
P_START: tl.constexpr = tl.constexpr(7)
P_STOP: tl.constexpr = tl.constexpr(8)
P_FIELDS: tl.constexpr = tl.constexpr(9)

# Fields of a task: the queries of some lanes, and the entries that they attend to.
T_LANES: tl.constexpr = tl.constexpr(0)
T_QUERIES: tl.constexpr = tl.constexpr(1)
T_ENTRIES: tl.constexpr = tl.constexpr(2)
T_PAST: tl.constexpr = tl.constexpr(3)
T_QUERY: tl.constexpr = tl.constexpr(4)
T_OUTPUT: tl.constexpr = tl.constexpr(5)
T_PAGES: tl.constexpr = tl.constexpr(6)
T_INDEX: tl.constexpr = tl.constexpr(7)
T_PAGED: tl.constexpr = tl.constexpr(8)
T_PIECES: tl.constexpr = tl.constexpr(9)
T_COUNT: tl.constexpr = tl.constexpr(10)
T_MASK: tl.constexpr = tl.constexpr(11)
T_MASK_LANE: tl.constexpr = tl.constexpr(12)
T_MASK_QUERY: tl.constexpr = tl.constexpr(13)
T_FIRST: tl.constexpr = tl.constexpr(14)
T_STOP: tl.constexpr = tl.constexpr(15)
T_SHIFT: tl.constexpr = tl.constexpr(16)
T_PART: tl.constexpr = tl.constexpr(17)
T_BLOCKS: tl.constexpr = tl.constexpr(18)
T_HEAD: tl.constexpr = tl.constexpr(19)
T_ROW: tl.constexpr = tl.constexpr(20)
T_FIELDS: tl.constexpr = tl.constexpr(21)

# Fields of a write: where the new entries of a step go, and those that they evict.
W_LANES: tl.constexpr = tl.constexpr(0)
W_TOKENS: tl.constexpr = tl.constexpr(1)
W_EVICTS: tl.constexpr = tl.constexpr(2)
W_KEY: tl.constexpr = tl.constexpr(3)
W_VALUE: tl.constexpr = tl.constexpr(4)
W_KEYS: tl.constexpr = tl.constexpr(5)
W_VALUES: tl.constexpr = tl.constexpr(11)
W_FIELDS: tl.constexpr = tl.constexpr(18)  # an even number, so that what follows is aligned


@triton.jit
def _product(a, b, before):
    """Return the product of two matrices, added to a float32 one."""
    if INTERPRETED:  # which multiplies the codes of bfloat16 numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, before, input_precision="ieee")


@triton.jit
def _rounded(numbers, dtype: tl.constexpr):
    """Return float32 numbers in another type, rounded to the nearest."""
    if INTERPRETED and dtype == tl.bfloat16:  # which cuts them off
        bits = numbers.to(tl.uint32, bitcast=True)
        numbers = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def _bound(address, lane, otherwise):
    """Return the number of a lane, out of int32 numbers at an address; at 0 there are none."""
    numbers = address.to(tl.pointer_type(tl.int32))
    return tl.load(numbers + lane, mask=address != 0, other=0).to(tl.int64) + tl.where(address != 0, 0, otherwise)


@triton.jit
def _located(keys, values, entry, pieces, low, high, base, lane):
    """Return the addresses of those of some entries that lie in the pieces from ``low`` to ``high``."""
    for number in range(low, high):
        piece = pieces + number * P_FIELDS
        place = entry - base - tl.load(piece + P_START)
        inside = (place >= 0) & (entry - base < tl.load(piece + P_STOP))
        read = lane % tl.load(piece + P_LANES)
        key = tl.load(piece + P_KEYS) + read * tl.load(piece + P_KEY_LANE) + place * tl.load(piece + P_KEY_ROW)
        value = tl.load(piece + P_VALUES) + read * tl.load(piece + P_VALUE_LANE) + place * tl.load(piece + P_VALUE_ROW)
        keys, values = tl.where(inside, key, keys), tl.where(inside, value, values)
    return keys, values


@triton.jit
def _addresses(tasks, task, start, lane):
    """Return the addresses of the keys and values of a tile of entries from ``start`` on: first those in full pages,
    whose index names the page of each 64th entry, then those in the few pieces behind them."""
    entry = start + tl.arange(0, _TILE)
    paged, index = tl.load(task + T_PAGED), tl.load(task + T_INDEX).to(tl.pointer_type(tl.int64))
    some, last = (paged > 0) & (start < paged), (paged + _TILE - 1) // _TILE
    low = tl.load(index + tl.minimum(tl.maximum(start, 0) // _TILE, last), mask=some, other=0)
    high = tl.load(index + tl.minimum((tl.maximum(start, 0) + _TILE - 1) // _TILE + 1, last), mask=some, other=-1) + 1
    nowhere = tl.zeros((_TILE,), tl.int64)
    pages = tl.load(task + T_PAGES).to(tl.pointer_type(tl.int64))
    keys, values = _located(nowhere, nowhere, entry, pages, low, high, 0, lane)
    pieces = tasks + tl.load(task + T_PIECES)
    return _located(keys, values, entry, pieces, 0, tl.load(task + T_COUNT), paged, lane)


@triton.jit
def _attended(
    top, total, acc, query, anchor, tasks, task, lane, token, begin, end, first, stop, scaling,
    ROWS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend to the entries from ``begin`` to ``end``, in tiles, after those whose highest score, sum of weights and
    sum of weighted values are ``top``, ``total`` and ``acc``. A query sees entries from ``first`` to its own."""
    past, mask = tl.load(task + T_PAST), tl.load(task + T_MASK)
    marks = mask.to(tl.pointer_type(tl.int8)) + lane * tl.load(task + T_MASK_LANE)
    marks += token[:, None] * tl.load(task + T_MASK_QUERY)
    limit = tl.minimum(past + token + 1, stop)
    k, v = tl.arange(0, K), tl.arange(0, V)
    SIZE: tl.constexpr = query.dtype.primitive_bitwidth // 8
    here = anchor.to(tl.int64)  # of which the compiler knows the alignment, unlike of an address out of a table
    for start in range(begin, end, _TILE):
        entry = start + tl.arange(0, _TILE)
        there = (entry >= first) & (entry < end)
        key_at, value_at = _addresses(tasks, task, start, lane)
        key_at, value_at = (key_at - here) // SIZE, (value_at - here) // SIZE
        key_at, value_at = tl.multiple_of(key_at, ALIGN), tl.multiple_of(value_at, VALUE_ALIGN)
        keys = tl.load(anchor + key_at[None, :] + k[:, None], mask=there[None, :] & (k < DIM)[:, None], other=0.0)
        scores = _product(query, keys, tl.zeros((ROWS, _TILE), tl.float32)) * scaling
        if CAP != 0:  # cap * tanh(score / cap)
            scores = CAP * (2.0 * tl.sigmoid(2.0 / CAP * scores) - 1.0)
        seen = there[None, :] & (entry[None, :] < limit[:, None])
        seen &= tl.load(marks + entry[None, :], mask=seen & (mask != 0), other=1) != 0
        scores = tl.where(seen & (scores == scores), scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights, kept = tl.exp(scores - base[:, None]), tl.exp(top - base)
        total, top = total * kept + tl.sum(weights, 1), highest
        values = tl.load(
            anchor + value_at[:, None] + v[None, :], mask=there[:, None] & (v < VALUE_DIM)[None, :], other=0.0
        )
        rounded = _rounded(weights, query.dtype)
        acc = _product(rounded, values, acc * kept[:, None])
        if query.dtype != tl.float32:  # a second product brings what rounding the weights has lost
            rest = _rounded(weights - rounded.to(tl.float32), query.dtype)
            acc = _product(rest, values, acc)
    return top, total, acc


@triton.jit
def _merged(top, total, acc, other_top, other_total, other_acc):
    """Combine two partial results of the same queries, the first of which belongs to earlier entries."""
    highest = tl.maximum(top, other_top)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    kept, added = tl.exp(top - base), tl.exp(other_top - base)
    return highest, total * kept + other_total * added, acc * kept[:, None] + other_acc * added[:, None]


@triton.jit
def _place(tasks, tile, lanes, tiles, groups, row):
    """Return the task of a tile, its lane, and group and token of some rows of the tile; a row that is none gets a
    token behind the last one."""
    number, place = tile // (tiles * lanes), tile % (tiles * lanes)
    task, lane = tasks + number * T_FIELDS, (place // tiles).to(tl.int64)
    queries = tl.where(lane < tl.load(task + T_LANES), tl.load(task + T_QUERIES), 0)
    token = tl.where(queries > 0, row // groups, 1).to(tl.int64)
    return task, lane, row % groups, token, queries


@triton.jit
def _range(task, lane):
    """Return the first entry that a lane sees, the one behind the last, and where its first block begins."""
    shift = _bound(tl.load(task + T_SHIFT), lane, 0)
    first = tl.maximum(_bound(tl.load(task + T_FIRST), lane, 0), 0)
    last = tl.minimum(tl.load(task + T_ENTRIES), tl.load(task + T_PAST) + tl.load(task + T_QUERIES))
    stop = tl.minimum(_bound(tl.load(task + T_STOP), lane, last), last)
    return first, stop, ((first + shift) >> _BLOCK_BITS) * _BLOCK - shift  # the place may be negative


@triton.jit
def _stored(
    top, total, acc, task, lane, group, token, queries, output, lse, state, sinks,
    out_lane, out_group, out_token, groups, heads, last,
    V: tl.constexpr, VALUE_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store the attention of some rows, or what a later call begins with."""
    real, v = token < queries, tl.arange(0, V)
    inside = real[:, None] & (v < VALUE_DIM)[None, :]
    number = tl.load(task + T_ROW) + (lane * groups + group) * queries + token
    if last != 0:
        if SINKS:
            head = (tl.load(task + T_HEAD) + lane * groups + group) % heads
            sink = tl.load(sinks + head, mask=real, other=0.0)
            top, total, acc = _merged(top, total, acc, sink, tl.full(sink.shape, 1.0, tl.float32), tl.zeros_like(acc))
        some = tl.where(total > 0, total, 1.0)
        result = acc / some[:, None]
        place = tl.load(task + T_OUTPUT) + lane * out_lane + group * out_group + token * out_token
        tl.store(output + place[:, None] + v[None, :], _rounded(result, output.dtype.element_ty), mask=inside)
        tl.store(lse + number, top + tl.log(some), mask=real)
    else:
        kept = state + number * (VALUE_DIM + 2)
        tl.store(kept, top, mask=real)
        tl.store(kept + 1, total, mask=real)
        tl.store(kept[:, None] + 2 + v[None, :], acc, mask=inside)


@triton.jit
def _begun(
    state, task, lane, group, token, queries, groups, resumes,
    ROWS: tl.constexpr, V: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return what an earlier call stored, or the attention to nothing."""
    v, known = tl.arange(0, V), (token < queries) & (resumes != 0)
    kept = state + (tl.load(task + T_ROW) + (lane * groups + group) * queries + token) * (VALUE_DIM + 2)
    top = tl.load(kept, mask=known, other=float("-inf"))
    total = tl.load(kept + 1, mask=known, other=0.0)
    acc = tl.load(kept[:, None] + 2 + v[None, :], mask=known[:, None] & (v < VALUE_DIM)[None, :], other=0.0)
    return top, total, acc


@triton.jit
def _queries(
    query, task, lane, group, token, queries, query_lane, query_group, query_token,
    K: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, K)
    place = tl.load(task + T_QUERY) + lane * query_lane + group * query_group + token * query_token
    there = (token < queries)[:, None] & (k < DIM)[None, :]
    return tl.load(query + place[:, None] + k[None, :], mask=there, other=0.0)


# -- a few queries: a program for each block, and one for each row that combines them --------------------------------


@triton.jit(do_not_specialize=["lanes", "tiles", "groups"])
def attend_block(
    tasks, anchor, query, parts, sums, scaling, query_lane, query_group, query_token, lanes, tiles, groups,
    ROWS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Attend to one block of entries. Grid: (tiles of all lanes of all tasks, blocks)."""
    row, v = tl.arange(0, ROWS), tl.arange(0, V)
    tile = tl.program_id(0) % tiles
    task, lane, group, token, queries = _place(tasks, tl.program_id(0), lanes, tiles, groups, tile * ROWS + row)
    first, stop, begin = _range(task, lane)
    begin += tl.program_id(1).to(tl.int64) * _BLOCK
    end = tl.where(queries > 0, tl.minimum(begin + _BLOCK, stop), begin)
    q = _queries(query, task, lane, group, token, queries, query_lane, query_group, query_token, K, DIM)
    top, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    top, total, acc = _attended(
        top, total, tl.zeros((ROWS, V), tl.float32), q, anchor, tasks, task, lane, token, begin, end, first, stop,
        scaling, ROWS, K, V, DIM, VALUE_DIM, ALIGN, VALUE_ALIGN, CAP,
    )  # fmt: skip
    block = (lane * tiles + tile) * tl.load(task + T_BLOCKS) + tl.program_id(1)
    number = tl.load(task + T_PART) + block * ROWS + row
    real = (token < queries) & (begin < end)
    tl.store(sums + 2 * number, top, mask=real)
    tl.store(sums + 2 * number + 1, total, mask=real)
    tl.store(parts + number[:, None] * V + v[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["lanes", "tiles", "groups", "heads", "resumes", "last"])
def combine(
    tasks, parts, sums, output, lse, state, sinks, out_lane, out_group, out_token, lanes, tiles, groups, heads,
    resumes, last, ROWS: tl.constexpr, V: tl.constexpr, VALUE_DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the blocks of one query, in order. Grid: (tiles of all lanes of all tasks, queries of a tile)."""
    row, v = tl.program_id(1) + tl.arange(0, 1), tl.arange(0, V)
    tile = tl.program_id(0) % tiles
    task, lane, group, token, queries = _place(tasks, tl.program_id(0), lanes, tiles, groups, tile * ROWS + row)
    _, stop, begin = _range(task, lane)
    top, total, acc = _begun(state, task, lane, group, token, queries, groups, resumes, 1, V, VALUE_DIM)
    number = tl.load(task + T_PART) + (lane * tiles + tile) * tl.load(task + T_BLOCKS) * ROWS + row
    for start in range(begin, tl.where(queries > 0, stop, begin), _BLOCK * _COMBINED):
        for more in tl.static_range(_COMBINED):
            real = (token < queries) & (start + more * _BLOCK < stop)
            other_top = tl.load(sums + 2 * number, mask=real, other=float("-inf"))
            other_total = tl.load(sums + 2 * number + 1, mask=real, other=0.0)
            other = tl.load(parts + number[:, None] * V + v[None, :], mask=real[:, None], other=0.0)
            top, total, acc = _merged(top, total, acc, other_top, other_total, other)
            number += ROWS
    _stored(
        top, total, acc, task, lane, group, token, queries, output, lse, state, sinks,
        out_lane, out_group, out_token, groups, heads, last, V, VALUE_DIM, SINKS,
    )  # fmt: skip


# -- many queries: a program reads all entries that its queries see --------------------------------------------------


@triton.jit(do_not_specialize=["lanes", "tiles", "groups", "heads", "resumes", "last"])
def attend_chunk(
    tasks, anchor, query, output, lse, state, sinks, scaling, query_lane, query_group, query_token,
    out_lane, out_group, out_token, lanes, tiles, groups, heads, resumes, last,
    ROWS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend to all entries in order. Grid: (tiles of all lanes of all tasks,)."""
    tile = tl.program_id(0) % tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    task, lane, group, token, queries = _place(tasks, tl.program_id(0), lanes, tiles, groups, row)
    first, stop, begin = _range(task, lane)
    latest = tl.minimum((tile * ROWS + ROWS - 1) // groups, queries - 1)
    end = tl.where(queries > 0, tl.minimum(stop, tl.load(task + T_PAST) + latest + 1), begin)
    q = _queries(query, task, lane, group, token, queries, query_lane, query_group, query_token, K, DIM)
    top, total, acc = _begun(state, task, lane, group, token, queries, groups, resumes, ROWS, V, VALUE_DIM)
    top, total, acc = _attended(
        top, total, acc, q, anchor, tasks, task, lane, token, begin, end, first, stop, scaling,
        ROWS, K, V, DIM, VALUE_DIM, ALIGN, VALUE_ALIGN, CAP,
    )  # fmt: skip
    _stored(
        top, total, acc, task, lane, group, token, queries, output, lse, state, sinks,
        out_lane, out_group, out_token, groups, heads, last, V, VALUE_DIM, SINKS,
    )  # fmt: skip


# -- new entries -----------------------------------------------------------------------------------------------------


@triton.jit
def _moved(write, new, lane, lanes, tokens, evicts, D: tl.constexpr, DIM: tl.constexpr, token_stride):
    """Copy the rows that are evicted, and then write new ones into some of them."""
    d = tl.arange(0, D)
    element: tl.constexpr = tl.pointer_type(new.dtype.element_ty)
    there = (d < DIM) & (lane < lanes)
    row, evicted_row = tl.load(write + 1), tl.load(write + 4)
    ring = tl.load(write) + lane * tl.load(write + 2)
    page = tl.load(write + 3) + lane * tl.load(write + 5)
    for number in range(0, evicts):
        entry = tl.load((ring + (tokens - evicts + number) * row).to(element) + d, mask=there)
        tl.store((page + number * evicted_row).to(element) + d, entry, mask=there)
    tl.debug_barrier()  # other threads may write what this one copies
    for number in range(0, tokens):
        entry = tl.load(new + number * token_stride + d, mask=there)
        tl.store((ring + number * row).to(element) + d, entry, mask=there)


@triton.jit(do_not_specialize=["lanes"])
def write_entries(
    writes, key, value, key_lane, key_token, value_lane, value_token, lanes,
    K: tl.constexpr, V: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Write the new entries of one lane, and copy those that they evict. Grid: (lanes of all steps,)."""
    write, lane = writes + (tl.program_id(0) // lanes) * W_FIELDS, (tl.program_id(0) % lanes).to(tl.int64)
    count, tokens, evicts = tl.load(write + W_LANES), tl.load(write + W_TOKENS), tl.load(write + W_EVICTS)
    new_key = key + tl.load(write + W_KEY) + lane * key_lane
    new_value = value + tl.load(write + W_VALUE) + lane * value_lane
    _moved(write + W_KEYS, new_key, lane, count, tokens, evicts, K, DIM, key_token)
    _moved(write + W_VALUES, new_value, lane, count, tokens, evicts, V, VALUE_DIM, value_token)
