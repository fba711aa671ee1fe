"""What a step must keep: a plan that does not fit its tensors is refused before anything is written.

Both executors have these rules. The library compares lengths and types once more (``native/checks.h``); only here are
shapes seen, and integers of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.step.plan import Destination, LayerStep, Span

_BESIDE = (torch.int32, torch.float32, torch.float32, torch.int32)
"""The types of what lies beside entries, in the order of :class:`Destination`."""
_SLOTS = 2**31


class StepShape(NamedTuple):
    """The shape of what a step writes to."""

    lanes: int
    rows: int
    """Of each lane."""
    widths: tuple[int, int]
    """Of a key and a value."""
    evicted_rows: int
    """The rows that the evicted entry may be copied to; 0 where it is discarded."""


def check(step: LayerStep) -> StepShape:
    """Raise BadCall where a step breaks a rule; its others are not checked."""
    bank, append, evict = bank_of(step), step.append, step.evict
    check_beside(append, bank.lanes)
    if append.slots is not None and step.ranks is None and append.row > append.slots.shape[1] - step.tokens:
        raise BadCall("a new entry must take a column of its bank")
    if evict is not None:
        check_beside(evict, bank.lanes, append)
    for span in step.attend:
        keys, values = span[:2]
        check_pair(keys, values)
        check_entries(span, min(keys.shape[-2], values.shape[-2]))
        lanes = keys.shape[-3 if isinstance(keys, Tensor) else 0]
        if (lanes, keys.shape[-1], values.shape[-1]) != (bank.lanes, *bank.widths):
            raise BadCall("a span must have the lanes of its step, and be as wide as new entries")
    check_token(step, bank, step.entries)
    if any(part is not None and part.dtype != torch.float32 for part in (step.new_scores, step.received)):
        raise BadCall("new scores and received attention must be float32")
    return bank


def bank_of(step: LayerStep) -> StepShape:
    """Return the shape of what a step writes to. Raises BadCall where tensors of entries, or ``seen``, do not fit."""
    lanes, rows, widths = _written(step.append)
    evicted_rows, evict, seen = 0, step.evict, step.seen
    if evict is not None:
        evicted_lanes, evicted_rows, evicted_widths = _written(evict)
        types = [(one.keys.dtype, one.values.dtype) for one in (step.append, evict)]
        if (evicted_lanes, evicted_widths) != (lanes, widths) or types[0] != types[1]:
            raise BadCall("evicted entries must be copied to a row of each lane, of the same width and type")
    if seen is not None and (
        seen.dtype != torch.bool or seen.dim() != 2 or len(seen) != lanes or seen.shape[1] < step.entries
    ):
        raise BadCall("empty places must be bool, (lanes, entries or more)")
    return StepShape(lanes, rows, widths, evicted_rows)


def _written(one: Destination) -> tuple[int, int, tuple[int, int]]:
    """Return lanes, rows and widths."""
    shapes = []
    if one.keys is one.values:
        raise BadCall("keys and values must not share memory")
    for part in one[:2]:
        if not isinstance(part, Tensor) or part.dim() < 3 or part.shape[:-3] not in ((), (1,)):
            raise BadCall("entries must be written to tensors, (lanes, rows, width)")
        extent = 1
        for stride, count in sorted(zip(part.stride(), part.shape, strict=True)):
            if count > 1 and stride < extent:
                raise BadCall("rows of a bank must not share memory")
            extent += stride * max(0, count - 1)
        if part.numel() and (part.storage_offset() + extent) * part.itemsize > part.untyped_storage().nbytes():
            raise BadCall("rows of a bank must lie within its memory")
        shapes.append(part.shape[-3:])
    (lanes, rows, key_dim), (value_lanes, value_rows, value_dim) = shapes
    if lanes != value_lanes:
        raise BadCall("keys and values must have the same lanes")
    return lanes, min(rows, value_rows), (key_dim, value_dim)


def check_beside(one: Destination, lanes: int, source: Destination | None = None) -> None:
    """Check slots, scores and counts: those of a bank, or where those of the ``source`` are copied to."""
    slots, _, extra, newest = beside = one[3:]
    columns = 1 if source is not None else 0 if slots is None or slots.dim() != 2 else slots.shape[1]
    for part, dtype, copied in zip(beside, _BESIDE, beside if source is None else source[3:], strict=True):
        if part is None:
            continue
        if copied is None or slots is None:
            raise BadCall("scores and counts must come with slots, and copies of them with what is copied")
        if part.shape != (lanes, columns) or part.dtype != dtype or not part.is_contiguous():
            raise BadCall("slots must be int32, scores and counts float32, one for each lane and column, in order")
    if source is None and (extra is None) != (newest is None):
        raise BadCall("counts of merged tokens must come with the last slot among them")


def check_token(step: LayerStep, bank: StepShape, entries: int) -> None:
    """Check what changes with every token. entries: those that the last query attends to."""
    append, slot, ranks, _, new_scores, evict, _, _, reduce, received, _, _, tokens, evicts, place, *_ = step
    if tokens != 1 and not (
        0 < tokens <= entries and ranks is None and (evict is None or evict.slots is None) and not reduce
    ):
        raise BadCall("several tokens of a step must attend to their own entries, and rank and score none")
    if place is not None and (tokens > 1 or place.shape != (1,) or append.slots is not None or evict is not None):
        raise BadCall("a row on the device must be that of one token, which evicts nothing")
    if not 0 < evicts <= tokens:
        raise BadCall("entries must be evicted by tokens of their step")
    if ranks is not None:
        slots = append.slots
        if slots is None or ranks.shape != slots.shape or not 0 < ranks.shape[1] <= bank.rows:
            raise BadCall("ranks must come with slots, one for each lane and column of the bank")
    elif not 0 <= append.row <= bank.rows - tokens:
        raise BadCall("a new entry must take a column of its bank")
    if not isinstance(slot, Tensor) and not 0 <= slot <= _SLOTS - tokens:
        raise BadCall("the slot of a new entry must be a number of 31 bits")
    if evict is not None and not 0 <= evict.row <= bank.evicted_rows - evicts:
        raise BadCall("evicted entries must be copied to a row of each lane")
    if new_scores is not None and new_scores.shape != (bank.lanes,):
        raise BadCall("new scores must be one for each lane")
    if received is None:
        if reduce:
            raise BadCall("attention that is reduced must have a place")
    elif reduce not in ("sum", "max") or received.shape != (bank.lanes, entries):
        raise BadCall("received attention must be a sum or max, and have a place for each lane and entry")


def check_pair(keys: Any, values: Any) -> None:
    """Check that keys and values are both tensors, or both coded."""
    if isinstance(keys, Tensor) is not isinstance(values, Tensor) or (
        isinstance(keys, Tensor) and min(keys.dim(), values.dim()) < 3
    ):
        raise BadCall("keys and values must both be (lanes, rows, width), or both be coded")


def check_entries(span: Span, rows: int) -> None:
    """Check that a span of a step lies within its rows, and has all of them if they are coded."""
    check_span(span.start, span.stop, rows)
    if not isinstance(span.keys, Tensor) and span.entries != rows:
        raise BadCall("a coded span must have all of its entries")


def check_span(start: int, stop: int, rows: int) -> None:
    """Check that a span of keys and values with so many rows lies within them."""
    if not 0 <= start <= stop <= rows:
        raise BadCall("a span must lie within its rows, and not end before it begins")


def check_lanes(
    parts: Sequence[LayerStep], banks: Sequence[StepShape], shape: tuple[int, int, int] | None = None
) -> int:
    """Return the lanes of a token, which its parts must cover in order. shape: KV heads, key_dim and value_dim of its
    entry; None: unknown."""
    lanes = 0
    for part, bank in zip(parts, banks, strict=True):
        if part.first_lane != lanes:
            raise BadCall("parts of a step must be of the lanes of its token, in order")
        lanes += bank.lanes
    if shape is not None and any((lanes, *bank.widths) != shape for bank in banks):
        raise BadCall("a step must have the KV heads and the widths of its token")
    return lanes
