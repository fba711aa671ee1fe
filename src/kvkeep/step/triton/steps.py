"""Planned steps by the kernels: those of all sessions of a pass in the same launches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.step import torch as plain
from kvkeep.step.checks import StepShape, check, check_entries, check_lanes, check_token
from kvkeep.step.plan import LayerStep, Writes
from kvkeep.step.triton.calls import EVERYTHING, MAX_FEW, LaneTask, Layout, Writing, can_attend, launch
from kvkeep.step.triton.tables import readable


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
    Raises BadCall where a step does not fit its tensors.
    """
    writes = writes or Writes()
    reads = list[bool]()
    for one, token in zip(steps, tokens, strict=True):
        forms = [_form(part, query) for part in one.parts]
        check_lanes(one.parts, [form.shape for form in forms], (key.shape[1], key.shape[3], value.shape[3]))
        reads.append(all(form.reads for form in forms))
        if not 0 <= token <= query.shape[2] - one.tokens:
            raise BadCall("the tokens of a step must be some of the call")
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    heads, width = query.shape[1], value.shape[3]
    groups = heads // key.shape[1]
    output = query.new_empty(1, query.shape[2], heads, width)
    parts = list[tuple[LayerStep, int]]()
    for one, token, read in zip(steps, tokens, reads, strict=True):
        if read and one.tokens <= MAX_FEW:
            parts += [(part, token) for part in one.parts]
        else:
            here = slice(token, token + one.tokens)
            row = query[:, :, here], key[:, :, here], value[:, :, here]
            output[:, here] = plain.run([one], [0], *row, scaling, sinks, writes)
    if parts:
        writing = _writing(parts, key, value, writes)
        tasks = [_task(part, token, query, output, groups) for part, token in parts]
        given = Layout(query, groups * query.stride(1), query.stride(1), query.stride(2))
        result = Layout(output, groups * width, width, heads * width)
        launch(tasks, given, result, groups, scaling, sinks, writing=writing)
    return output


class _Form(NamedTuple):
    """What is the same of steps with the same tensors, which are checked once."""

    shape: StepShape
    rows: list[int]
    """Of each span."""
    reads: bool
    """Whether the kernels run the step."""


_FORMS: dict[tuple[Any, ...], tuple[_Form, list[weakref.ref[Any]], list[int]]] = {}
"""By the ids of tensors, as long as all of them live: a form, these, and where they lie."""


def _form(step: LayerStep, query: Tensor) -> _Form:
    """Check one part of a step, and return its form. Raises BadCall where it does not fit its tensors."""
    append, evict = step.append, step.evict
    beside = (None if one is None else one.slots for one in (append, evict))
    if step.reduce or step.seen is not None or any(slots is not None for slots in beside):
        return _Form(check(step), [], _reads(step, query))
    parts = [*append[:2], *(() if evict is None else evict[:2]), *(one for span in step.attend for one in span[:2])]
    name = (query.dtype, query.device, step.ranks is None, evict is None, *map(id, parts))
    places = [one.data_ptr() for one in parts if isinstance(one, Tensor)]
    known = _FORMS.get(name)
    if known is None or known[2] != places:
        rows = [min(span.keys.shape[-2], span.values.shape[-2]) for span in step.attend]
        form = _Form(check(step), rows, _reads(step, query))
        # A partial is called without a line of Python, in which Ctrl-C could end it.
        _FORMS[name] = form, [weakref.ref(one, partial(_FORMS.pop, name)) for one in parts], places
        return form
    for span, count in zip(step.attend, known[0].rows, strict=True):
        check_entries(span, count)
    check_token(step, known[0].shape, step.entries)
    return known[0]


def _reads(step: LayerStep, query: Tensor) -> bool:
    """Return whether the kernels run one part of a step."""
    written = [part for one in (step.append, step.evict) if one is not None for part in one[:2]]
    return (
        not step.reduce
        and not step.window
        and all(readable(part, query) for part in written)
        and all(can_attend(query, span.keys, span.values) for span in step.attend)
    )


def _task(step: LayerStep, token: int, query: Tensor, output: Tensor, groups: int) -> LaneTask:
    seen = step.seen
    if seen is not None and seen.stride(1) != 1:
        seen = seen.contiguous()
    return LaneTask(
        step.append.keys.shape[-3],
        step.tokens,
        step.attend,
        step.entries - step.tokens if step.tokens > 1 else EVERYTHING,
        step.first_lane * groups * query.stride(1) + token * query.stride(2),
        step.first_lane * groups * output.stride(2) + token * output.stride(1),
        step.first_lane * groups,
        None if seen is None else seen[:, None],
    )


def _writing(parts: Sequence[tuple[LayerStep, int]], key: Tensor, value: Tensor, writes: Writes) -> Writing | None:
    """Return what some steps write. Where a step ranks rows, writes more than entries or finds its row on the device,
    plain operations write it here."""
    numbers, lanes, ids = list[int](), 1, list[int]()
    for step, token in parts:
        append, evict, count = step.append, step.evict, step.append.keys.shape[-3]
        if step.ranks is not None or append.slots is not None or step.place is not None:
            lane, here = slice(step.first_lane, step.first_lane + count), slice(token, token + step.tokens)
            plain.write(step, key[0, lane, here], value[0, lane, here], writes)
            continue
        places = (step.first_lane * part.stride(1) + token * part.stride(2) for part in (key, value))
        numbers += [count, step.tokens, 0 if evict is None else step.evicts, *places]
        numbers += [*_row(append.keys, append.row), *(_NOWHERE if evict is None else _row(evict.keys, evict.row))]
        numbers += [*_row(append.values, append.row), *(_NOWHERE if evict is None else _row(evict.values, evict.row))]
        numbers.append(0)
        lanes = max(lanes, count)
        ids.append(id(step))
    return Writing(key, value, numbers, lanes, ids, writes) if numbers else None


def _row(part: Tensor, number: int) -> list[int]:
    """Return the address of a row of keys or values, and the strides of rows and lanes."""
    row, lane = (part.stride(axis) * part.itemsize for axis in (-2, -3))
    return [part.data_ptr() + number * row, row, lane]


_NOWHERE = [0, 0, 0]
