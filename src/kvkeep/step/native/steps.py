"""Planned steps by the native library: writing an entry in each lane, running one layer, or running all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.native.library import kernels, library
from kvkeep.native.structures import (
    KvAttention,
    KvInsert,
    KvStep,
    Table,
    address,
    address_of,
    address_table,
    count_table,
)
from kvkeep.step.native.entries import SpanTable
from kvkeep.step.plan import Destination, LayerStep


def can_insert(step: LayerStep, keys: Tensor, values: Tensor) -> bool:
    """Return whether the library can write new entries as a step says; any type of numbers will do."""
    append, ranks = step.append, step.ranks
    return (
        append.keys.device.type == "cpu"
        and (ranks is None or ranks.dtype in (torch.float32, torch.int32))
        and (keys.dtype, values.dtype) == (append.keys.dtype, append.values.dtype)
        and append.keys.is_contiguous()
        and append.values.is_contiguous()
        and library() is not None
    )


def insert(step: LayerStep, keys: Tensor, values: Tensor) -> None:
    """Write the new entry of each lane, keys and values (lanes, dim), and copy the one that it evicts."""
    keys, values = keys.contiguous(), values.contiguous()
    compiled = _compiled(step)
    kernels().kvkeep_insert(address_of(compiled.struct.insert), len(keys), keys.data_ptr(), values.data_ptr())


def run(
    steps: Sequence[LayerStep], tokens: Sequence[int], query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Run one layer for one token of each of several sessions: write its entry, and return its attention, (1, row,
    heads, value_dim). Places of the row without such a token have arbitrary results.

    steps, tokens: the step of each session, and its token's place in the row. query: (1, heads, row, dim). key, value:
    (1, kv_heads, row, dim).
    """
    heads, row = query.shape[1:3]
    query, key, value = query.transpose(1, 2).contiguous(), key.contiguous(), value.contiguous()
    output = torch.empty(1, row, heads, value.shape[3], dtype=torch.bfloat16)
    lse = torch.empty(row, heads)
    table = _step_table(steps, tokens)
    kernels().kvkeep_attend_sessions(
        address_of(table),
        len(table),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        row,
        heads,
        False,
        scaling,
        output.data_ptr(),
        lse.data_ptr(),
    )
    return output


def run_layers(
    layers: Table, scaling: Table, steps: Sequence[Sequence[LayerStep]], x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Run all layers of a decoder for one token of each of several sessions; return the output of the last layer,
    (1, tokens, hidden).

    layers, scaling: the layers in the library's form, and the scaling of their attention. steps: for each layer, a step
    for each token. x: (1, tokens, hidden), the input of the first layer. cos, sin: (tokens, dim).
    """
    x = x.clone(memory_format=torch.contiguous_format)
    tables = [_step_table(of_layer, range(len(of_layer))) for of_layer in steps]
    counts = count_table([len(table) for table in tables])
    kernels().kvkeep_run_layers(
        address_of(layers),
        address_of(by_layer := address_table([address_of(table) for table in tables])),
        address_of(scaling),
        len(by_layer),
        address_of(counts),
        x.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        x.data_ptr(),
    )
    return x


def _step_table(steps: Sequence[LayerStep], tokens: Sequence[int]) -> Table:
    addresses = []
    for step, token in zip(steps, tokens, strict=True):
        lanes = step.token_lanes
        for part in step.parts:
            struct = _compiled(part).struct
            struct.token, struct.first_lane, struct.token_lanes = token, part.first_lane, lanes
            addresses.append(address_of(struct))
    return address_table(addresses)


def _compiled(step: LayerStep) -> _Compiled:
    """Return a step in the library's form, up to date."""
    made = step.compiled
    if made is None or made.append is not step.append:
        made = step.compiled = _Compiled(step.append)
    made.update(step)
    return made


class _Compiled:
    """A :class:`LayerStep` in the library's form. It is made once, and updated when the step changes."""

    def __init__(self, append: Destination) -> None:
        self.append = append
        keys, values = append.keys, append.values
        attention = KvAttention(
            lanes=len(keys), queries=1, dim=keys.shape[-1], value_dim=values.shape[-1], causal_offset=-1
        )
        self.struct = KvStep(attention, KvInsert())
        self._insert: KvInsert = self.struct.insert
        self._attention: KvAttention = self.struct.attention
        self._insert.keys, self._insert.values = keys.data_ptr(), values.data_ptr()
        self._insert.key_lane_bytes, self._insert.value_lane_bytes = (
            part.stride(0) * part.itemsize for part in (keys, values)
        )
        self._insert.key_bytes, self._insert.value_bytes = (part.shape[-1] * part.itemsize for part in (keys, values))
        self._table = SpanTable()

    def update(self, step: LayerStep) -> None:
        insert, append, evict, ranks = self._insert, step.append, step.evict, step.ranks
        insert.column, insert.new_slot = append.row, step.slot
        insert.slots, insert.scores = address(append.slots), address(append.scores)
        insert.extra, insert.newest = address(append.extra), address(append.newest)
        insert.new_scores = address(step.new_scores)
        insert.ranks = address(ranks)
        if append.slots is not None:
            insert.columns = append.slots.shape[1]
        if ranks is not None:
            insert.integer_ranks, insert.oldest_first = ranks.dtype == torch.int32, step.oldest
        if evict is None:
            insert.evicted_keys = None
        else:
            self._evict(evict)
        self.struct.received, self.struct.reduce_max = address(step.received), step.reduce == "max"
        self._attention.mask = address(step.seen)
        self._attention.mask_lane_stride = 0 if step.seen is None else step.seen.stride(0)
        self._table.show(self._attention, step.attend)

    def _evict(self, evict: Destination) -> None:
        insert, keys, values = self._insert, evict.keys, evict.values
        insert.evicted_key_lane_bytes = keys.stride(0) * keys.itemsize
        insert.evicted_value_lane_bytes = values.stride(0) * values.itemsize
        insert.evicted_keys = keys.data_ptr() + evict.row * keys.stride(1) * keys.itemsize
        insert.evicted_values = values.data_ptr() + evict.row * values.stride(1) * values.itemsize
        insert.evicted_slots, insert.evicted_scores = address(evict.slots), address(evict.scores)
        insert.evicted_extra, insert.evicted_newest = address(evict.extra), address(evict.newest)
