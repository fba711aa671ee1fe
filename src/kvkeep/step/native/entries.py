"""The inputs of the native library: entries in tensors, in codes, or in a sketch, and tables of their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.native.library import library
from kvkeep.native.structures import (
    MAX_DIM,
    TILE_ENTRIES,
    KvAttention,
    KvPiece,
    Table,
    address_of,
    copy_piece,
    piece_table,
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
    if span.compiled is None:
        piece, rows = KvPiece(), (0, 0)
        tensors = _describe(piece, span.keys, span.values)
        if isinstance(span.keys, Tensor):
            rows = tuple(part.stride(1) * part.itemsize for part in tensors)  # type: ignore[assignment]
        span.compiled = piece, tensors, (piece.keys or 0, piece.values or 0), rows  # without entries, the address is 0
    piece, _, (keys, values), (key_bytes, value_bytes) = span.compiled
    piece.keys, piece.values = keys + span.start * key_bytes, values + span.start * value_bytes
    piece.entries = span.stop - span.start
    return piece


def _describe(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    """Fill a row of the kernel's table; return the tensors that it points to, some of them copies."""
    if isinstance(keys, Tensor):
        return _entries(row, keys, values)
    by_layout = {"grouped": _describe_codes, "by channel": _describe_channels, "sketched": _describe_estimates}
    return by_layout[keys.layout](row, keys, values)


def _entries(row: KvPiece, keys: Tensor, values: Tensor) -> list[Tensor]:
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    row.keys, row.values, (row.lanes, row.entries, _) = keys.data_ptr(), values.data_ptr(), keys.shape
    row.key_lane_stride, row.key_row_stride, _ = keys.stride()
    row.value_lane_stride, row.value_row_stride, _ = values.stride()
    return [keys, values]


def _describe_codes(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    row.lanes, _, row.entries, _ = keys.shape
    row.key_bits, row.value_bits, row.value_group = keys.bits, values.bits, values.width
    tensors = [
        part if part[0].is_contiguous() else part.contiguous()
        for part in (keys.codes, keys.scale, keys.offset, values.codes, values.scale, values.offset)
    ]
    codes, scale, offset = tensors[:3]
    groups = row.entries // TILE_ENTRIES
    row.keys, row.key_scale, row.key_offset = codes.data_ptr(), scale.data_ptr(), offset.data_ptr()
    row.key_lane_stride, row.key_scale_stride = codes.stride(0) * codes.itemsize, scale.stride(0)
    row.key_row_stride = codes[0].numel() // groups * codes.itemsize
    codes, scale, offset = tensors[3:]
    row.values, row.value_scale, row.value_offset = codes.data_ptr(), scale.data_ptr(), offset.data_ptr()
    row.value_lane_stride, row.value_scale_stride = codes.stride(0) * codes.itemsize, scale.stride(0)
    row.value_row_stride = codes[0].numel() // groups * codes.itemsize
    if (mean := getattr(values, "mean", None)) is not None:
        channels = [part.expand(len(codes), -1, -1).contiguous() for part in (mean, values.deviation)]
        row.value_mean, row.value_deviation = (part.data_ptr() for part in channels)
        tensors += channels
    return tensors


def _describe_channels(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    row.lanes, _, row.entries, _ = keys.shape
    row.key_bits = row.value_bits = 8
    for name, part in (("key", keys), ("value", values)):
        setattr(row, f"{name}s", part.codes.data_ptr())
        setattr(row, f"{name}_lane_stride", part.codes.stride(0))
        setattr(row, f"{name}_row_stride", part.codes.stride(1))
        setattr(row, f"{name}_scale", part.scale.data_ptr())
        setattr(row, f"{name}_offset", part.offset.data_ptr())
        setattr(row, f"{name}_scale_stride", part.scale.stride(0))
    return [tensor for part in (keys, values) for tensor in (part.codes, part.scale, part.offset)]


def _describe_estimates(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    row.sums, row.lanes, row.entries = keys.at.shape
    row.use_median = keys.by == "median"
    places = keys.at.int().contiguous()
    tensors = [places]
    row.cell_indices = places.data_ptr()
    for name, part in (("key", keys), ("value", values)):
        cells = part.cells.contiguous()
        tensors.append(cells)
        setattr(row, f"{name}s", cells.data_ptr())
        setattr(row, f"{name}_lane_stride", cells.stride(0))
    if keys.mean is not None:
        means = [part.mean.float().contiguous() for part in (keys, values)]
        tensors += means
        row.key_mean, row.value_mean = (mean.data_ptr() for mean in means)
    return tensors
