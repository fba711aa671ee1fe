"""The inputs of the native library: entries in tensors, in codes, or in a sketch, and tables of them.

What is compiled of keys and values belongs to this module. It is made once for the same objects, and forgotten with
them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.native.library import library
from kvkeep.native.structures import (
    BY_CHANNEL,
    GROUPED,
    MAX_DIM,
    PLAIN,
    SKETCHED,
    TILE_ENTRIES,
    KvPiece,
    Table,
    array,
    copy_pieces,
    piece_table,
    rows,
)
from kvkeep.step.checks import check_pair, check_span
from kvkeep.step.plan import JoinedSpans, Segment, Span


def attends(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the library attends with such tensors: it is loaded, and they are bfloat16 on the CPU."""
    return dtype == torch.bfloat16 and device.type == "cpu" and library() is not None


def can_attend(query: Tensor, keys: Any, values: Any) -> bool:
    """Return whether the library attends with these tensors: it is loaded, and they are bfloat16 on the CPU, in heads
    of even width."""
    return attends(query.dtype, query.device) and can_read(keys, values)


def can_read(keys: Any, values: Any) -> bool:
    """Return whether the library attends to entries in such tensors or codes."""
    readable = _plain if isinstance(keys, Tensor) else _READABLE.get(keys.layout)
    if readable is None or not readable(keys, values):
        return False
    return supports_dims(keys.shape[-1], values.shape[-1]) and library() is not None


def supports_dims(key_dim: int, value_dim: int) -> bool:
    """Return whether the library supports these widths of a head: an even one of keys, and both at most MAX_DIM."""
    return key_dim % 2 == 0 and max(key_dim, value_dim) <= MAX_DIM


def can_join(query: Tensor, segment: Segment) -> bool:
    """Return whether the library attends to a segment together with others."""
    return joinable(query, segment) and can_attend(query, segment.key, segment.value)


def joinable(query: Tensor, segment: Segment) -> bool:
    """Return whether a segment has the shape of those that are collected: one KV head, of all lanes."""
    mask, lanes = segment.mask, segment.lanes
    return (
        segment.key.shape[1] == 1
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
        and (lanes is None or (len(lanes) == len(query) and isinstance(segment.key, Tensor)))
    )


def _plain(keys: Any, values: Any) -> bool:
    return _bfloat16(keys) and _bfloat16(values)


def _bfloat16(part: Tensor) -> bool:
    return part.dtype == torch.bfloat16 and part.device.type == "cpu"


def _in_spans(keys: Any, values: Any) -> bool:
    return all(_plain(span.keys, span.values) for span in keys.spans)


def _grouped(keys: Any, values: Any) -> bool:
    """Return whether the entries are codes in groups of a tile."""
    return bool(values.width % 16 == 0)


def _by_channel(keys: Any, values: Any) -> bool:
    """Return whether the entries are codes of 8 bits with a scale for each channel."""
    return all(part.codes.dtype == torch.int8 and part.codes.shape[2] % 16 == 0 for part in (keys, values))


def _sketched(keys: Any, values: Any) -> bool:
    """Return whether the entries are means of sums, or medians of a number of sums that the kernel supports."""
    return (keys.by == "mean" or len(keys.at) in (1, 3, 5)) and all(
        _bfloat16(part.cells) and part.cells.shape[2] % 16 == 0 for part in (keys, values)
    )


_READABLE = {"spans": _in_spans, "grouped": _grouped, "by channel": _by_channel, "sketched": _sketched}
"""By layout: the function that says whether the library reads such codes."""


def spans_of(key: Any, value: Any) -> Sequence[Span]:
    """Return keys and values as spans: (lanes, n, dim) each, or coded ones, or a :class:`JoinedSpans`."""
    if isinstance(key, Tensor):
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            key, value = key.contiguous(), value.contiguous()
        return [Span(key, value, 0, key.shape[1])]
    return key.spans if isinstance(key, JoinedSpans) else [Span(key, value, 0, key.shape[2])]


class Compiled(NamedTuple):
    """Keys and values in the library's form. It points to their tensors, and does not keep them."""

    pieces: Table
    """One piece, or one for each of several spans."""
    entries: int
    """The number of their entries."""
    copies: list[Tensor]
    """Tensors that were made for the library."""
    tensors: Sequence[Tensor]
    """Those that codes or joined spans consist of. They are kept as long as these are."""
    memory: Sequence[int]
    """Of ``tensors``, or of the keys and values themselves (:func:`memory_of`)."""


_COMPILED: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], Compiled]] = {}
"""By id of the keys, as long as they live: keys, values, and what was compiled of them."""


def compiled(keys: Any, values: Any) -> Compiled:
    """Return keys and values in the library's form, which is made once for the same tensors or codes. Raises BadCall
    where the library cannot read them."""
    number = id(keys)
    known = _COMPILED.get(number)
    if known is not None and known[0]() is keys and known[1]() is values:
        made = known[2]
        if made.memory == memory_of(made.tensors or [keys, values]):
            return made
    made = _compiled(keys, values)
    # A partial is called without a line of Python, in which Ctrl-C could end it.
    _COMPILED[number] = weakref.ref(keys, partial(_COMPILED.pop, number)), weakref.ref(values), made
    return made


def memory_of(tensors: Sequence[Any]) -> list[int]:
    """Return where tensors begin, and the bytes of their storages: these change where a tensor is given other memory,
    or its storage another size."""
    return [*map(Tensor.data_ptr, tensors), *map(_STORAGE_BYTES, map(Tensor.untyped_storage, tensors))]


_STORAGE_BYTES = torch.UntypedStorage.nbytes


def _tensors_of(keys: Any, values: Any) -> list[Tensor]:
    """Return the tensors of codes or joined spans."""
    if isinstance(keys, JoinedSpans):
        sides = [side for span in keys.spans for side in span[:2]]
        return [one for side in sides for one in ([side] if isinstance(side, Tensor) else _tensors_of(side, side))]
    parts = [getattr(side, name, None) for side in (keys, values) for name in _PARTS]
    return [one for one in parts if one is not None]


_PARTS = ("codes", "scale", "offset", "mean", "deviation", "cells", "at")
"""The attributes of codes and sketches that are tensors."""


def _compiled(keys: Any, values: Any) -> Compiled:
    check_pair(keys, values)
    if isinstance(keys, JoinedSpans):
        tensors = _tensors_of(keys, values)
        return Compiled(table_of(keys.spans), keys.shape[2], [], tensors, memory_of(tensors))
    form = PLAIN if isinstance(keys, Tensor) else _FORMATS[keys.layout]
    table, copies = piece_table(1), list[Tensor]()
    table[0].format, table[0].entries = form, keys.shape[-2]
    _DESCRIBE[form](table[0], keys, values, copies)
    tensors = [] if form == PLAIN else _tensors_of(keys, values)
    return Compiled(table, keys.shape[-2], copies, tensors, memory_of(tensors or [keys, values]))


def table_of(spans: Sequence[Span]) -> Table:
    """Return the library's table of some spans."""
    parts = [compiled(span.keys, span.values) for span in spans]
    table, number = piece_table(sum(len(one.pieces) for one in parts)), 0
    for span, one in zip(spans, parts, strict=True):
        copy_pieces(table, number, one.pieces)
        narrow(table[number], span, one)
        number += len(one.pieces)
    return table


def narrow(piece: KvPiece, span: Span, made: Compiled) -> None:
    """Let a copy of the first piece of ``made`` begin and end with a span of it. Raises BadCall for rows that it does
    not have, and for a part of several pieces."""
    check_span(span.start, span.stop, made.entries)
    if len(made.pieces) == 1:
        piece.first, piece.entries = made.pieces[0].first + span.start, span.stop - span.start
    elif span.start or span.stop != made.entries:
        raise BadCall("a span of several pages must have all of their rows")


def _describe_rows(piece: KvPiece, keys: Tensor, values: Tensor, copies: list[Tensor]) -> None:
    piece.keys.rows, piece.values.rows = rows(keys), rows(values)


def _contiguous(part: Tensor, copies: list[Tensor]) -> Tensor:
    """Return a tensor whose numbers lie in order. If it is a copy, it is appended to ``copies``."""
    if part.is_contiguous():
        return part
    copies.append(part.contiguous())
    return copies[-1]


def _describe_codes(piece: KvPiece, keys: Any, values: Any, copies: list[Tensor]) -> None:
    piece.values.group, groups = values.width, keys.shape[2] // TILE_ENTRIES
    for side, part in ((piece.keys, keys), (piece.values, values)):
        side.bits = part.bits
        for name, numbers in (("rows", part.codes), ("scale", part.scale), ("offset", part.offset)):
            lanes = numbers if numbers[:1].is_contiguous() else _contiguous(numbers, copies)
            setattr(side, name, rows(lanes.view(len(lanes), groups, lanes[0].numel() // max(1, groups))))
    if (mean := getattr(values, "mean", None)) is not None:
        channels = (_contiguous(part.expand(len(keys.codes), -1, -1), copies) for part in (mean, values.deviation))
        piece.values.mean, piece.values.deviation = map(array, channels)


def _describe_channels(piece: KvPiece, keys: Any, values: Any, copies: list[Tensor]) -> None:
    for side, part in ((piece.keys, keys), (piece.values, values)):
        side.rows, side.scale, side.offset = rows(part.codes), rows(part.scale), rows(part.offset)


def _describe_estimates(piece: KvPiece, keys: Any, values: Any, copies: list[Tensor]) -> None:
    places = keys.at.int().contiguous()
    piece.sums, piece.use_median, piece.cell_indices = len(places), keys.by == "median", array(places)
    copies.append(places)
    for side, part in ((piece.keys, keys), (piece.values, values)):
        side.rows = rows(_contiguous(part.cells, copies))
        if keys.mean is not None:
            copies.append(mean := part.mean.float().contiguous())
            side.mean = array(mean)


_FORMATS = {"grouped": GROUPED, "by channel": BY_CHANNEL, "sketched": SKETCHED}
_DESCRIBE: dict[int, Callable[[KvPiece, Any, Any, list[Tensor]], None]] = {
    PLAIN: _describe_rows,
    GROUPED: _describe_codes,
    BY_CHANNEL: _describe_channels,
    SKETCHED: _describe_estimates,
}
"""By format: the function that fills a piece, and adds the copies that it points to."""
