"""The inputs of the native library: entries in tensors, in codes, or in a sketch, and tables of their addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.native.library import library
from kvkeep.native.structures import (
    BY_CHANNEL,
    GROUPED,
    MAX_DIM,
    PLAIN,
    SKETCHED,
    TILE_ENTRIES,
    KvAttention,
    KvPiece,
    Table,
    address_of,
    array,
    copy_piece,
    piece_table,
    rows,
)
from kvkeep.step.plan import JoinedSpans, Segment, Span


def can_attend(query: Tensor, keys: Any, values: Any) -> bool:
    """Return whether the library attends with these tensors: it is loaded, and they are bfloat16 on the CPU, in heads
    of even width."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu":
        return False
    return can_read(keys, values)


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
    mask, lanes = segment.mask, segment.lanes
    return (
        can_attend(query, segment.key, segment.value)
        and segment.key.shape[1] == 1
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
        and (lanes is None or (len(lanes) == len(query) and isinstance(segment.key, Tensor)))
        and not (segment.shared and mask is not None)
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
        return [Span(key, value, 0, key.shape[1])]
    return key.spans if isinstance(key, JoinedSpans) else [Span(key, value, 0, key.shape[2])]


class SpanTable:
    """The library's table of spans. Only spans that changed are written again."""

    def __init__(self) -> None:
        self._spans: list[tuple[Span, int, int]] = []
        self._table: Table = piece_table(0)

    def show(self, attention: KvAttention, spans: Sequence[Span]) -> None:
        """Write ``spans`` into the table, and set it in ``attention``."""
        if len(spans) != len(self._spans):
            self._table, self._spans = piece_table(len(spans)), [(span, -1, -1) for span in spans]
        entries = 0
        for number, span in enumerate(spans):
            known, start, stop = self._spans[number]
            entries += span.stop - span.start
            if known is not span or start != span.start or stop != span.stop:
                copy_piece(self._table, number, piece_of(span))
                self._spans[number] = span, span.start, span.stop
        attention.pieces, attention.piece_count, attention.entries = address_of(self._table), len(spans), entries


def piece_of(span: Span) -> KvPiece:
    """Return a span as the library reads it, up to date."""
    if span.compiled is None or span.compiled[2] is not span.keys or span.compiled[3] is not span.values:
        layout = PLAIN if isinstance(span.keys, Tensor) else _FORMATS[span.keys.layout]
        made, tensors = KvPiece(format=layout), list[Tensor]()
        _DESCRIBE[layout](made, span.keys, span.values, tensors)
        span.compiled = made, tensors, span.keys, span.values
    piece: KvPiece = span.compiled[0]
    piece.first, piece.entries = span.start, span.stop - span.start
    return piece


def _describe_rows(piece: KvPiece, keys: Tensor, values: Tensor, tensors: list[Tensor]) -> None:
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    piece.keys.rows, piece.values.rows = rows(keys), rows(values)
    tensors += [keys, values]


def _describe_codes(piece: KvPiece, keys: Any, values: Any, tensors: list[Tensor]) -> None:
    piece.values.group, groups = values.width, keys.shape[2] // TILE_ENTRIES
    for side, part in ((piece.keys, keys), (piece.values, values)):
        side.bits = part.bits
        for name, numbers in (("rows", part.codes), ("scale", part.scale), ("offset", part.offset)):
            tensors.append(lanes := numbers if numbers[0].is_contiguous() else numbers.contiguous())
            setattr(side, name, rows(lanes.view(len(lanes), groups, lanes[0].numel() // max(1, groups))))
    if (mean := getattr(values, "mean", None)) is not None:
        channels = [part.expand(len(keys.codes), -1, -1).contiguous() for part in (mean, values.deviation)]
        piece.values.mean, piece.values.deviation = map(array, channels)
        tensors += channels


def _describe_channels(piece: KvPiece, keys: Any, values: Any, tensors: list[Tensor]) -> None:
    for side, part in ((piece.keys, keys), (piece.values, values)):
        side.rows, side.scale, side.offset = rows(part.codes), rows(part.scale), rows(part.offset)
        tensors += [part.codes, part.scale, part.offset]


def _describe_estimates(piece: KvPiece, keys: Any, values: Any, tensors: list[Tensor]) -> None:
    places = keys.at.int().contiguous()
    piece.sums, piece.use_median, piece.cell_indices = len(places), keys.by == "median", array(places)
    tensors.append(places)
    for side, part in ((piece.keys, keys), (piece.values, values)):
        tensors.append(cells := part.cells.contiguous())
        side.rows = rows(cells)
        if keys.mean is not None:
            tensors.append(mean := part.mean.float().contiguous())
            side.mean = array(mean)


_FORMATS = {"grouped": GROUPED, "by channel": BY_CHANNEL, "sketched": SKETCHED}
_DESCRIBE: dict[int, Callable[[KvPiece, Any, Any, list[Tensor]], None]] = {
    PLAIN: _describe_rows,
    GROUPED: _describe_codes,
    BY_CHANNEL: _describe_channels,
    SKETCHED: _describe_estimates,
}
"""By format: the function that fills a piece, and adds the tensors that it points to, some of them copies."""
