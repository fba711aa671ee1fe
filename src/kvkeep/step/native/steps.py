"""Planned steps by the native library: writing an entry in each lane, running one layer, or running all layers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.native.library import kernels, library
from kvkeep.native.structures import (
    ADDRESS_BYTES,
    KvPiece,
    KvStep,
    Table,
    address_of,
    address_table,
    array,
    count_table,
    describe,
    rows,
)
from kvkeep.step.checks import bank_of, check_beside, check_lanes, check_token
from kvkeep.step.native.entries import compiled, memory_of, narrow, table_of
from kvkeep.step.plan import Destination, LayerStep, MovedSteps, Planned, TextSteps, Writes
from kvkeep.step.scores import cap_of


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
    """Write the new entry of each lane, keys and values (lanes, dim), and copy the one that it evicts.
    Raises BadCall where the step does not fit its tensors."""
    (form := _form(step)).write(step)
    kernels().kvkeep_insert(address_of(form.struct.insert), keys.contiguous(), values.contiguous())


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
    (1, row, heads, value_dim). Places of the row without such a token have arbitrary results.

    steps, tokens: the step of each session, and its first token's place in the row. query: (1, heads, row, dim). key,
    value: (1, kv_heads, row, dim). sinks: of each head, (heads,) float32. writes: notes which steps have written.
    """
    heads, row = query.shape[1:3]
    query, key, value = query.transpose(1, 2).contiguous(), key.contiguous(), value.contiguous()
    output = torch.empty(1, row, heads, value.shape[3], dtype=torch.bfloat16)
    lse = torch.empty(row, heads)
    (addresses,) = _addresses([steps], tokens, writes or Writes(), (key.shape[1], key.shape[3], value.shape[3]))
    table, cap = address_table(addresses), cap_of(scaling)
    kernels().kvkeep_attend_sessions(
        address_of(table), len(table), query, key, value, row, heads, False, scaling, cap, sinks, output, lse
    )
    return output


def run_layers(
    layers: Table,
    part: slice,
    planned: Planned,
    writes: Writes,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    normed: Tensor | None = None,
) -> None:
    """Run some layers of a decoder, one after the other, for the next tokens of each of several sessions.

    layers: the layers in the library's form. part: their numbers. planned: the steps of the tokens. writes: notes which
    of them have written. x: (1, tokens, hidden), the residual stream, read and written. cos, sin: (tokens, dim); None:
    no layer rotates. normed: written where the last layer has no MLP here: what enters its MLP.
    """
    by_session = [_session(steps, part, token, writes) for steps, token in planned]
    by_layer = [[*chain.from_iterable(one)] for one in zip(*by_session, strict=True)]
    table, counts = address_table([*chain.from_iterable(by_layer)]), count_table([*map(len, by_layer)])
    starts = [address_of(table) + ADDRESS_BYTES * number for number in accumulate(counts, initial=0)]
    kernels().kvkeep_run_layers(
        address_of(layers),
        address_of(tables := address_table(starts[:-1])),
        len(tables),
        address_of(counts),
        cos,
        sin,
        x,
        normed,
    )


def wrote(step: LayerStep, writes: Writes) -> bool:
    """Return whether the entry that a step evicts is copied. Its place may then have the new one."""
    return all(_form(part).struct.written == writes.number for part in step.parts)


_MOVING: dict[tuple[int, int], tuple[weakref.ref[TextSteps], list[_Form], Table, list[list[int]]]] = {}
"""By id of planned steps, as long as they live, and the first of some layers: in these layers, the forms of the steps,
and where they lie, as the library's table and by layer."""


def _session(steps: MovedSteps, part: slice, token: int, writes: Writes) -> list[list[int]]:
    """Return where the steps of a session in some layers lie in the library's form. Steps that apply again are only
    moved, in one call: most of the time between two passes of several sessions would else be Python's."""
    planned, layers = steps.planned, range(part.start, part.stop)
    if not steps.rows:
        return _addresses([[planned.by_layer[layer]] for layer in layers], [token], writes)  # shapes are the layers'
    name = id(planned), part.start
    if name not in _MOVING:
        forms = list[_Form]()
        for layer in layers:
            forms.append(form := _form(step := planned.by_layer[layer]))
            form.write(step)
            form.struct.token_lanes = form.bank.lanes
        addresses = [form.address for form in forms]
        by_layer = [[one] for one in addresses]
        # A partial is called without a line of Python, in which Ctrl-C could end it.
        _MOVING[name] = weakref.ref(planned, partial(_MOVING.pop, name)), forms, address_table(addresses), by_layer
    _, _, table, by_layer = _MOVING[name]
    slot = planned.by_layer[part.start].slot + steps.rows
    kernels().kvkeep_move_steps(address_of(table), len(table), slot, token, writes.number)
    return by_layer


def _addresses(
    layers: Sequence[Sequence[LayerStep]],
    tokens: Sequence[int],
    writes: Writes,
    shape: tuple[int, int, int] | None = None,
) -> list[list[int]]:
    """Return where the steps of each layer lie in the library's form, whose first tokens are ``tokens``. shape: KV
    heads, key_dim and value_dim of the new entries; None: the library knows them. Raises BadCall where a step has
    others."""
    found = []
    for steps in layers:
        addresses: list[int] = []
        for step, token in zip(steps, tokens, strict=True):
            form = _form(step)
            form.write(step)
            forms, lanes = [form], form.bank.lanes
            if step.others or step.first_lane or shape is not None:
                for part in step.others:
                    forms.append(form := _form(part))
                    form.write(part)
                lanes = check_lanes(step.parts, [one.bank for one in forms], shape)
            for form in forms:
                form.struct.token, form.struct.token_lanes, form.struct.number = token, lanes, writes.number
                addresses.append(form.address)
        found.append(addresses)
    return found


class _Form:
    """One part of a step in the library's form: its keys and values are compiled once, and all else is written for each
    token. The library checks all of it. Steps of one form have the same fields: those that are None stay empty."""

    def __init__(self, step: LayerStep) -> None:
        append, evict, reads = step.append, step.evict, [compiled(span.keys, span.values) for span in step.attend]
        self._reads, self._table = reads, table_of(step.attend)
        self.inner = tuple(one for read in reads for one in read.tensors)
        starts = accumulate((len(one.pieces) for one in reads), initial=0)
        self._pieces: list[KvPiece] = [self._table[start] for start in [*starts][:-1]]
        self._shown: list[tuple[int, ...]] = [(span.start, span.stop) for span in step.attend]
        self.bank = bank_of(step)
        self.struct = KvStep(reduce_max=step.reduce == "max", first_lane=step.first_lane)
        self.address = address_of(self.struct)
        self._insert, self._attention = self.struct.insert, self.struct.attention
        self._ranks, self._received = self._insert.ranks, self.struct.received
        self._insert.keys, self._insert.values = rows(append.keys), rows(append.values)
        self._point("", append)
        self._insert.columns = 0 if append.slots is None else append.slots.shape[1]
        if evict is not None:
            self._insert.evicted_keys, self._insert.evicted_values = rows(evict.keys), rows(evict.values)
            self._point("evicted_", evict, append)
        attention = self._attention
        attention.lanes, attention.queries, attention.causal_offset = self.bank.lanes, step.tokens, -1
        attention.dim, attention.value_dim = self.bank.widths
        attention.pieces, attention.piece_count = address_of(self._table), len(self._table)
        attention.window = step.window
        if step.window:
            with torch.inference_mode(False):  # later steps write it outside
                self._shift = torch.zeros(self.bank.lanes, dtype=torch.int32)
            attention.shift = array(self._shift)
        if step.seen is not None:
            attention.mask = rows(step.seen[:, None])

    def write(self, step: LayerStep) -> None:
        """Write what changes with every token. Raises BadCall for a tensor that the library cannot read."""
        insert, append, evict, entries = self._insert, step.append, step.evict, 0
        for number, span in enumerate(step.attend):
            entries += span.stop - span.start
            bounds = span.start, span.stop
            if self._shown[number] != bounds or number == len(self._shown) - 1:  # the library may have moved the last
                self._shown[number] = ()  # until it is written
                narrow(self._pieces[number], span, self._reads[number])
                self._shown[number] = bounds
        check_token(step, self.bank, entries)
        if step.place is not None:
            raise BadCall("the library needs the row of a new entry as a number, not as a tensor")
        self._attention.entries = entries
        if step.tokens > 1 or step.window:
            self._attention.causal_offset = entries - step.tokens
        if step.window:
            self._shift.fill_(step.first)
        insert.column, insert.new_slot, insert.oldest_first = append.row, step.slot, step.oldest
        self.struct.evicts = step.evicts
        if step.ranks is not None:
            describe(self._ranks, step.ranks)
        if step.new_scores is not None:
            insert.new_scores = array(step.new_scores)
        if evict is not None:
            insert.evicted_row = evict.row
        if step.received is not None:
            describe(self._received, step.received)

    def _point(self, prefix: str, one: Destination, source: Destination | None = None) -> None:
        """Let the structure point to what lies beside entries."""
        check_beside(one, self.bank.lanes, source)
        for name, tensor in zip(("slots", "scores", "extra", "newest"), one[3:], strict=True):
            setattr(self._insert, prefix + name, array(tensor))


_FORMS: dict[tuple[Any, ...], tuple[_Form, list[weakref.ref[Any]], itemgetter[Any], list[int]]] = {}
"""By what :func:`_form` says, as long as all its parts live: a form, these, what takes the tensors among them, and
where they and the form's other tensors lie (:func:`memory_of`)."""


def _form(step: LayerStep) -> _Form:
    """Return the form of the steps with these tensors and codes, and with the same fields, which is made once."""
    append, _, ranks, _, new_scores, evict, attend, seen, reduce, received, first_lane, _, tokens, *_ = step
    keys, values, _, *parts = append
    parts += keys, values, seen
    if evict is not None:
        parts += evict[:2] + evict[3:]
    for span in attend:
        parts += span[:2]
    name = (
        first_lane,
        tokens,
        reduce,
        evict is None,
        ranks is None,
        new_scores is None,
        received is None,
        *map(id, parts),
    )
    known = _FORMS.get(name)
    if known is not None:
        form, _, pick, memory = known
        if memory == memory_of(pick(parts) + form.inner):
            return form
    places = {id(one): at for at, one in enumerate(parts) if isinstance(one, Tensor)}.values()  # each tensor once
    form, pick = _Form(step), itemgetter(*places)
    # A partial is called without a line of Python, in which Ctrl-C could end it.
    refs = [weakref.ref(one, partial(_FORMS.pop, name)) for one in parts if one is not None]
    _FORMS[name] = form, refs, pick, memory_of(pick(parts) + form.inner)
    return form
