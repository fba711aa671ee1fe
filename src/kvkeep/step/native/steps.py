"""Planned steps by the native library: writing an entry in each lane, running one layer, or running all layers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvkeep.native.library import kernels, library
from kvkeep.native.structures import (
    KvAttention,
    KvInsert,
    KvPiece,
    KvStep,
    Table,
    address,
    address_of,
    address_table,
    count_table,
)
from kvkeep.step.checks import PlanError, check_all_lanes, check_lanes, check_token, measured_step
from kvkeep.step.native.entries import compiled, table_of
from kvkeep.step.plan import LayerStep

_RANKS = torch.float32, torch.int32


def can_insert(step: LayerStep, keys: Tensor, values: Tensor) -> bool:
    """Return whether the library can write new entries as a step says; any type of numbers will do."""
    append, ranks = step.append, step.ranks
    return (
        append.keys.device.type == "cpu"
        and (ranks is None or ranks.dtype in _RANKS)
        and (keys.dtype, values.dtype) == (append.keys.dtype, append.values.dtype)
        and append.keys.is_contiguous()
        and append.values.is_contiguous()
        and library() is not None
    )


def insert(step: LayerStep, keys: Tensor, values: Tensor) -> None:
    """Write the new entry of each lane, keys and values (lanes, dim), and copy the one that it evicts. Raises PlanError
    where the step does not fit its tensors."""
    form = _form(step)
    if not len(keys) == len(values) == form.target.lanes:
        raise PlanError("append", f"has {form.target.lanes} lanes, and there are {len(keys)} new entries")
    form.write(step, keys.dtype, keys.shape[1], values.shape[1])
    keys, values = keys.contiguous(), values.contiguous()
    kernels().kvkeep_insert(address_of(form.struct.insert), len(keys), keys.data_ptr(), values.data_ptr())


def run(
    steps: Sequence[LayerStep], tokens: Sequence[int], query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Run one layer for one token of each of several sessions: write its entry, and return its attention, (1, row,
    heads, value_dim). Places of the row without such a token have arbitrary results.

    steps, tokens: the step of each session, and its token's place in the row. query: (1, heads, row, dim). key, value:
    (1, kv_heads, row, dim). Raises PlanError where a step does not fit its tensors or these.
    """
    heads, row = query.shape[1:3]
    query, key, value = query.transpose(1, 2).contiguous(), key.contiguous(), value.contiguous()
    output = torch.empty(1, row, heads, value.shape[3], dtype=torch.bfloat16)
    lse = torch.empty(row, heads)
    table = _StepTable(steps, tokens, row, key.shape[1], key.shape[3], value.shape[3])
    kernels().kvkeep_attend_sessions(
        address_of(table.addresses),
        len(table.addresses),
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
    layers: Table,
    scaling: Table,
    kv_heads: int,
    steps: Sequence[Sequence[LayerStep]],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Run all layers of a decoder for one token of each of several sessions; return the output of the last layer,
    (1, tokens, hidden).

    layers, scaling: the layers in the library's form, and the scaling of their attention. kv_heads: of each layer.
    steps: for each layer, a step for each token. x: (1, tokens, hidden), the input of the first layer. cos, sin:
    (tokens, dim). Raises PlanError where a step does not fit its tensors or the layers.
    """
    x = x.clone(memory_format=torch.contiguous_format)
    count, dim = x.shape[1], cos.shape[-1]
    tables = [_StepTable(of_layer, range(count), count, kv_heads, dim, dim) for of_layer in steps]
    counts = count_table([len(table.addresses) for table in tables])
    kernels().kvkeep_run_layers(
        address_of(layers),
        address_of(by_layer := address_table([address_of(table.addresses) for table in tables])),
        address_of(scaling),
        len(by_layer),
        address_of(counts),
        count,
        cos.data_ptr(),
        sin.data_ptr(),
        x.data_ptr(),
    )
    return x


class _StepTable:
    """Steps of one layer in the library's form, and the addresses of them. kv_heads: lanes of each token."""

    def __init__(
        self, steps: Sequence[LayerStep], tokens: Sequence[int], row: int, kv_heads: int, dim: int, value_dim: int
    ) -> None:
        addresses: list[int | None] = []
        for step, token in zip(steps, tokens, strict=True):
            if not 0 <= token < row:
                raise PlanError("tokens", f"has place {token}, outside the row of {row} tokens")
            lanes = 0
            for part in step.parts:
                check_lanes(part, lanes, kv_heads)
                form = _form(part)
                form.write(part, torch.bfloat16, dim, value_dim)
                form.struct.token, form.struct.token_lanes = token, kv_heads
                addresses.append(form.address)
                lanes += form.target.lanes
            check_all_lanes(lanes, kv_heads)
        self.addresses = address_table(addresses)


class _Form:
    """One part of a step in the library's form: its keys and values are compiled once, and all else is written for each
    token."""

    def __init__(self, step: LayerStep) -> None:
        self.target, self._left, self._spans = measured_step(step, compiled)
        if not self.target.lies_densely:
            raise PlanError("append", "has rows that do not lie one after the other")
        self._table = table_of(step.attend, self._spans)
        starts = accumulate((len(one.pieces) for one in self._spans), initial=0)
        self._pieces: list[KvPiece] = [self._table[start] for start in [*starts][:-1]]
        self._shown = [(span.start, span.stop) for span in step.attend]
        self.struct = KvStep(insert=self.target.insert, reduce_max=step.reduce == "max", first_lane=step.first_lane)
        self.address = address_of(self.struct)
        self._insert: KvInsert = self.struct.insert
        self._attention: KvAttention = self.struct.attention
        if self._left is not None:
            self._insert.evicted_key_lane_bytes, self._insert.evicted_value_lane_bytes = self._left.lane_bytes
        attention, target = self._attention, self.target
        attention.lanes, attention.queries, attention.causal_offset = target.lanes, 1, -1
        attention.dim, attention.value_dim = target.dim, target.value_dim
        attention.pieces, attention.piece_count = address_of(self._table), len(self._table)
        if step.seen is not None:
            attention.mask, attention.mask_lane_stride = step.seen.data_ptr(), step.seen.stride(0)

    def write(self, step: LayerStep, dtype: torch.dtype, dim: int, value_dim: int) -> None:
        """Write a token's step, whose new entries are of this type and width. Raises PlanError where it does not
        fit."""
        target, insert, append, evict = self.target, self._insert, step.append, step.evict
        if target.dtype is not dtype or target.dim != dim or target.value_dim != value_dim:
            found = f"{target.dtype} of {target.dim} and {target.value_dim}"
            raise PlanError("append", f"has entries of {found}; the new ones are {dtype} of {dim} and {value_dim}")
        self._attention.entries = check_token(step, target, self._left, self._spans)
        for number, span in enumerate(step.attend):
            if self._shown[number] != (bounds := (span.start, span.stop)):
                self._spans[number].narrow(self._pieces[number], span)
                self._shown[number] = bounds
        insert.column, insert.new_slot = append.row, step.slot
        if step.ranks is not None and step.ranks.dtype not in _RANKS:
            raise PlanError("ranks", f"is {step.ranks.dtype}; the library reads float32 and int32")
        if append.slots is not None:
            insert.slots, insert.columns = append.slots.data_ptr(), append.slots.shape[1]
            insert.scores, insert.new_scores = address(append.scores), address(step.new_scores)
            insert.extra, insert.newest = address(append.extra), address(append.newest)
            insert.ranks, insert.oldest_first = address(step.ranks), step.oldest
            insert.integer_ranks = step.ranks is not None and step.ranks.dtype is torch.int32
        if evict is not None and self._left is not None:
            (keys, values), (key_bytes, value_bytes) = self._left.addresses, self._left.row_bytes
            insert.evicted_keys, insert.evicted_values = keys + evict.row * key_bytes, values + evict.row * value_bytes
            if evict.slots is not None:
                insert.evicted_slots, insert.evicted_scores = evict.slots.data_ptr(), address(evict.scores)
                insert.evicted_extra, insert.evicted_newest = address(evict.extra), address(evict.newest)
        if step.received is not None:
            self.struct.received = step.received.data_ptr()


_FORMS: dict[tuple[Any, ...], tuple[_Form, list[weakref.ref[Any]]]] = {}
"""By what :func:`_form` says, as long as all keys and values live."""


def _form(step: LayerStep) -> _Form:
    """Return the form of the steps with these keys, values and ``seen``, which is made once. Steps with slots have
    other forms than those without."""
    append, evict, seen = step.append, step.evict, step.seen
    parts = [append.keys, append.values]
    if seen is not None:
        parts.append(seen)
    if evict is not None:
        parts += evict.keys, evict.values
    for span in step.attend:
        parts += span.keys, span.values
    has_slots = append.slots is not None, evict is not None and evict.slots is not None
    name = (step.first_lane, step.reduce, seen is None, evict is None, has_slots, *map(id, parts))
    known = _FORMS.get(name)
    if known is None:
        known = _FORMS[name] = _Form(step), [weakref.ref(one, lambda _: _FORMS.pop(name, None)) for one in parts]
    return known[0]
