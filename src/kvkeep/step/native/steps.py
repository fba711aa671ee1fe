"""Planned steps by the native library: writing an entry in each lane, running one layer, or running all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.native.library import kernels, library
from kvkeep.native.structures import (
    KvAttention,
    KvInsert,
    KvStep,
    Table,
    address_of,
    address_table,
    array,
    count_table,
    rows,
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
    kernels().kvkeep_insert(address_of(_compiled(step).struct.insert), keys.contiguous(), values.contiguous())


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
        address_of(table), len(table), query, key, value, row, heads, False, scaling, output, lse
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
        cos,
        sin,
        x,
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
        lanes, _, dim = append.keys.shape
        attention = KvAttention(lanes=lanes, queries=1, dim=dim, value_dim=append.values.shape[-1], causal_offset=-1)
        self.struct = KvStep(attention, KvInsert())
        self._insert: KvInsert = self.struct.insert
        self._attention: KvAttention = self.struct.attention
        self._table = SpanTable()
        self._shown: dict[str, Tensor | None] = {}  # the tensors that the structures point to

    def update(self, step: LayerStep) -> None:
        insert, append, evict = self._insert, step.append, step.evict
        insert.column, insert.new_slot, insert.oldest_first = append.row, step.slot, step.oldest
        insert.columns = 0 if append.slots is None else append.slots.shape[1]
        insert.evicted_row = 0 if evict is None else evict.row
        for name, described in _DESTINATION.items():
            self._show(insert, name, getattr(append, name), described)
            self._show(insert, f"evicted_{name}", None if evict is None else getattr(evict, name), described)
        self._show(insert, "new_scores", step.new_scores)
        self._show(insert, "ranks", step.ranks)
        self._show(self.struct, "received", step.received)
        self.struct.reduce_max = step.reduce == "max"
        self._show(self._attention, "mask", step.seen, _mask)
        self._table.show(self._attention, step.attend)

    def _show(
        self, struct: Any, name: str, tensor: Tensor | None, described: Callable[[Tensor | None], Any] = array
    ) -> None:
        """Set a field of a structure, unless it points to this tensor already."""
        if self._shown.get(name) is not tensor:
            setattr(struct, name, described(tensor))
            self._shown[name] = tensor


def _mask(seen: Tensor | None) -> Any:
    return rows(None if seen is None else seen[:, None])


_DESTINATION = {"keys": rows, "values": rows, "slots": array, "scores": array, "extra": array, "newest": array}
"""The tensors of a :class:`Destination`, and how they are described."""
