"""Where entries lie, as numbers that the kernels read from the device's memory.

A piece is a row of a table: addresses and strides of rows of keys and values. Full pages stay the same for hundreds of
tokens, so their table is sent to the device once. It has an index: for each 64th entry, the page that has it. The few
pieces behind them, which change with every token, are sent with each launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.step.constants import sent
from kvkeep.step.plan import JoinedSpans, Span
from kvkeep.step.triton.kernels import TILE_ENTRIES

MAX_PIECES = 4
"""The maximum number of pieces without an index: a program looks at each of them for every tile of entries."""
ALIGNMENT = 16
"""Bytes that are loaded at once, if rows have a multiple of them. Then they also begin at a multiple."""


class PageTable(NamedTuple):
    """A table of pieces that is in the device's memory."""

    numbers: Tensor
    """int64: the pieces, and then the index."""
    index_at: int
    """The address of the index."""
    entries: int


def alignment(width: int, dtype: torch.dtype) -> int:
    """Return how many numbers of a row of ``width`` numbers are loaded at once."""
    return 1 if width * dtype.itemsize % ALIGNMENT else ALIGNMENT // dtype.itemsize


def readable(part: Any, like: Tensor) -> bool:
    """Return whether the kernels read a tensor of entries, (..., rows, width): it is of the type and on the device of
    ``like``, and its rows begin where they can be loaded."""
    if not isinstance(part, Tensor) or part.dtype != like.dtype or part.device != like.device or part.stride(-1) != 1:
        return False
    unit = alignment(part.shape[-1], part.dtype) * part.itemsize
    strides = (part.stride(axis) * part.itemsize for axis in range(-3, -1))
    return not any(place % unit for place in (part.data_ptr(), *strides))


def readable_span(keys: Any, values: Any, like: Tensor) -> bool:
    """Return whether the kernels read keys and values: tensors, or :class:`JoinedSpans`."""
    if isinstance(keys, JoinedSpans):
        pages = pages_of(keys)
        return pages is not None and pages.numbers.device == like.device and keys.spans[0].keys.dtype == like.dtype
    return readable(keys, like) and readable(values, like)


_PAGES: dict[int, tuple[weakref.ref[Any], PageTable | None]] = {}
"""By id of joined spans, as long as they live."""


def pages_of(joined: JoinedSpans) -> PageTable | None:
    """Return the table of joined spans, which is made once. Their tensors keep their memory. None where the kernels
    cannot read them."""
    number = id(joined)
    known = _PAGES.get(number)
    if known is not None and known[0]() is joined:
        return known[1]
    first = joined.spans[0].keys
    fitting = all(readable(part, first) for span in joined.spans for part in span[:2])
    made = table(joined.spans) if isinstance(first, Tensor) and fitting else None
    # A partial is called without a line of Python, in which Ctrl-C could end it.
    _PAGES[number] = weakref.ref(joined, partial(_PAGES.pop, number)), made
    return made


def table(spans: Sequence[Span]) -> PageTable:
    """Return a table of spans of tensors, which must outlive it."""
    stops = [*accumulate(span.entries for span in spans)]
    rows = [piece(span, stop - span.entries) for span, stop in zip(spans, stops, strict=True)]
    places = torch.arange(0, stops[-1] + TILE_ENTRIES, TILE_ENTRIES)  # the last place is behind all entries
    index = torch.searchsorted(torch.tensor(stops), places, right=True).clamp(max=len(rows) - 1)
    numbers = sent(torch.cat([torch.tensor(rows).flatten(), index]), spans[0].keys.device)
    return PageTable(numbers, numbers.data_ptr() + len(rows) * len(rows[0]) * numbers.itemsize, stops[-1])


def piece(span: Span, start: int) -> list[int]:
    """Return the fields of a span of tensors whose first entry has the number ``start``."""
    keys, values = span.keys, span.values
    key_row, value_row, key_lane, value_lane = (
        part.stride(axis) * part.itemsize for axis in (-2, -3) for part in (keys, values)
    )
    places = keys.data_ptr() + span.start * key_row, values.data_ptr() + span.start * value_row
    lanes = keys.shape[-3]
    return [*places, key_row, value_row, key_lane, value_lane, lanes, start, start + span.entries]


def divided(spans: Sequence[Span]) -> tuple[PageTable | None, Sequence[Span]]:
    """Return the table of the first spans, and the few other ones."""
    first = spans[0].keys
    if isinstance(first, JoinedSpans) and len(spans) <= MAX_PIECES + 1:
        if all(isinstance(span.keys, Tensor) for span in spans[1:]):
            return pages_of(first), spans[1:]
    elif len(spans) <= MAX_PIECES and all(isinstance(span.keys, Tensor) for span in spans):
        return None, spans
    return table(JoinedSpans(spans).spans), ()
