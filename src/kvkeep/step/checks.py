"""Checks of a step, before an executor runs it: a wrong plan of a part is an error, and touches no memory.

Keys and values are measured once (:class:`Entries`), because they stay the same over many tokens; the native executor
keeps what it measured. The rest of a step changes with every token, and is compared with them each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvkeep.errors import KvkeepError
from kvkeep.step.plan import Destination, JoinedSpans, LayerStep, Span

MAX_SLOT = 2**31 - 1
"""The largest slot."""


class PlanError(KvkeepError):
    """A part of a method planned a step that does not fit its tensors; the message names the field."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"A part of the method planned a wrong step: '{field}' {reason}. Please report the method.")


class Entries:
    """Keys and values, measured: how many there are, and how large. field: its name in messages. Raises PlanError where
    they do not fit each other."""

    __slots__ = ("coded", "device", "dim", "dtype", "lanes", "rows", "value_dim")

    def __init__(self, field: str, keys: Any, values: Any) -> None:
        self.coded = not isinstance(keys, Tensor)
        if self.coded != (not isinstance(values, Tensor)):
            raise PlanError(field, "has codes on one side only")
        shapes = [tuple(part.shape) for part in (keys, values)]
        if self.coded:  # (lanes, 1, entries, dim)
            shapes = [(shape[0], *shape[2:]) for shape in shapes]
        elif all(len(shape) == 4 and shape[0] == 1 for shape in shapes):
            shapes = [shape[1:] for shape in shapes]
        if len(shapes[0]) != 3 or len(shapes[1]) != 3 or shapes[0][:2] != shapes[1][:2]:
            raise PlanError(field, f"has keys {shapes[0]} and values {shapes[1]}, not (lanes, rows, dim) both")
        self.dtype: torch.dtype | None = None if self.coded else keys.dtype
        self.device: torch.device | None = None if self.coded else keys.device
        if not self.coded and (values.dtype is not self.dtype or values.device != self.device):
            raise PlanError(field, "has keys and values of different types or devices")
        (self.lanes, self.rows, self.dim), self.value_dim = shapes[0], shapes[1][2]


E = TypeVar("E", bound=Entries)
"""Entries as an executor measures them."""
Measure = Callable[[str, Any, Any], E]
"""Returns what keys and values are. Its first argument is the field that has them."""


def measured_step(step: LayerStep, measure: Measure[E]) -> tuple[E, E | None, list[E]]:
    """Return the measured keys and values of ``append``, ``evict`` and each span of ``attend`` of a single part of a
    step. Raises PlanError where they, or ``seen``, do not fit each other. It does not read what changes with every
    token (:func:`check_token`)."""
    append, evict, seen = step.append, step.evict, step.seen
    target = measure("append", append.keys, append.values)
    if target.coded:
        raise PlanError("append", "has codes, which cannot be written to")
    left = None if evict is None else measure("evict", evict.keys, evict.values)
    spans = [measure("attend", span.keys, span.values) for span in step.attend]
    for field, one in [("attend", one) for one in spans] + ([] if left is None else [("evict", left)]):
        if (one.lanes, one.dim, one.value_dim) != (target.lanes, target.dim, target.value_dim):
            shapes = [(part.lanes, part.dim, part.value_dim) for part in (one, target)]
            raise PlanError(field, f"has (lanes, key_dim, value_dim) {shapes[0]}, and 'append' {shapes[1]}")
        if not one.coded and one.device != target.device:
            raise PlanError(field, f"is on {one.device}, not {target.device}")
    if left is not None and left.dtype is not target.dtype:
        raise PlanError("evict", f"has entries of {left.dtype}, not {target.dtype}")
    if seen is not None:
        if seen.dtype is not torch.bool or seen.ndim != 2 or len(seen) != target.lanes or seen.stride(1) != 1:
            raise PlanError("seen", f"is {tuple(seen.shape)} {seen.dtype}; it must be ({target.lanes}, columns) bool")
        if seen.device != target.device:
            raise PlanError("seen", f"is on {seen.device}, not {target.device}")
    return target, left, spans


def check_token(step: LayerStep, target: Entries, left: Entries | None, spans: Sequence[Entries]) -> int:
    """Return the number of entries that a part of a step attends to. Raises PlanError where a number, or a tensor
    beside the keys and values, does not fit what :func:`measured_step` returned."""
    append, slots, evict, entries = step.append, step.append.slots, step.evict, 0
    columns = target.rows if slots is None else slots.shape[-1]
    if step.ranks is None and not 0 <= append.row < columns:
        raise PlanError("append.row", f"is {append.row}, of {columns} rows")
    if not 0 <= step.slot <= MAX_SLOT:
        raise PlanError("slot", f"is {step.slot}")
    if slots is None:
        if not append.scores is append.extra is append.newest is step.ranks is step.new_scores is None:
            raise PlanError("append.slots", "is missing, and there are scores, counts or ranks")
    else:
        if columns > target.rows:
            raise PlanError("append.slots", f"has {columns} columns for {target.rows} rows")
        _check_beside("append", append, target, columns)
        if step.ranks is not None:
            _fits("ranks", step.ranks, (step.ranks.dtype,), (target.lanes, columns), target)
        if step.new_scores is not None:
            _fits("new_scores", step.new_scores, _FLOAT, (target.lanes,), target)
    if evict is not None and left is not None:
        if not 0 <= evict.row < left.rows:
            raise PlanError("evict.row", f"is {evict.row}, of {left.rows} rows")
        if evict.slots is not None:
            _check_beside("evict", evict, left, 1, append)
        elif not evict.scores is evict.extra is evict.newest is None:
            raise PlanError("evict.slots", "is missing, and there are scores or counts")
    for span, found in zip(step.attend, spans, strict=True):
        check_span(span, found)
        entries += span.stop - span.start
    if step.seen is not None and step.seen.shape[1] < entries:
        raise PlanError("seen", f"has {step.seen.shape[1]} columns for {entries} entries")
    if (step.received is None) == bool(step.reduce):
        raise PlanError("received", "is needed with 'reduce', and only then")
    if step.received is not None:
        if step.reduce not in ("sum", "max"):
            raise PlanError("reduce", f"is '{step.reduce}'; it can be 'sum', 'max' or empty")
        _fits("received", step.received, _FLOAT, (target.lanes, entries), target)
    return entries


def check_span(span: Span, found: Entries) -> None:
    """Raise PlanError where a span has rows that are not there. Codes begin at the first one, and a span of several
    pages has all of them."""
    complete = not found.coded or not (span.start or (span.stop != found.rows and isinstance(span.keys, JoinedSpans)))
    if not 0 <= span.start <= span.stop <= found.rows or not complete:
        raise PlanError("attend", f"has the rows {span.start} to {span.stop} of {found.rows}")


def check_lanes(step: LayerStep, lanes: int, kv_heads: int) -> None:
    """Raise PlanError where a part of a step does not begin at the next lane, after the ``lanes`` lanes of the parts
    before it, or where a token has no more lanes than ``kv_heads``."""
    if step.first_lane != lanes or lanes >= kv_heads:
        raise PlanError("first_lane", f"is {step.first_lane}, where lane {lanes} of {kv_heads} follows")


def check_all_lanes(lanes: int, kv_heads: int) -> None:
    """Raise PlanError where the parts of a step have other ``lanes`` than the ``kv_heads`` of a token."""
    if lanes != kv_heads:
        raise PlanError("others", f"and the step have {lanes} lanes of {kv_heads}")


def _check_beside(field: str, one: Destination, of: Entries, columns: int, source: Destination | None = None) -> None:
    """Check slots, scores and counts beside entries. source: where they are copied from, for an evicted entry."""
    shape = of.lanes, columns
    assert one.slots is not None
    _fits(field + ".slots", one.slots, _INTEGER, shape, of)
    if one.scores is not None:
        _fits(field + ".scores", one.scores, _FLOAT, shape, of)
    if one.extra is not None and one.newest is not None:
        _fits(field + ".extra", one.extra, _FLOAT, shape, of)
        _fits(field + ".newest", one.newest, _INTEGER, shape, of)
    elif one.extra is not one.newest:
        raise PlanError(field + ".extra", "and 'newest' need each other")
    if source is not None:
        for name in ("slots", "scores", "extra", "newest"):
            if getattr(one, name) is not None and getattr(source, name) is None:
                raise PlanError(f"{field}.{name}", f"is copied from append.{name}, which is missing")


_FLOAT, _INTEGER = (torch.float32,), (torch.int32,)


def _fits(field: str, part: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], of: Entries) -> None:
    """Raise PlanError where a tensor is not what a field must have."""
    if part.dtype not in dtypes or part.shape != shape or not part.is_contiguous():
        raise PlanError(field, f"is {tuple(part.shape)} {part.dtype}; it must be {shape} {dtypes[0]}, and contiguous")
    if part.device != of.device:
        raise PlanError(field, f"is on {part.device}, not {of.device}")
