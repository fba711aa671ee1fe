"""The inputs of the native library: entries in tensors, in codes, or in a sketch, and tables of their addresses.

What is compiled of keys and values belongs to this module. It is made once for the same objects, and forgotten with
them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.native.library import library
from kvkeep.native.structures import (
    MAX_DIM,
    TILE_ENTRIES,
    KvInsert,
    KvPiece,
    Table,
    copy_pieces,
    piece_table,
)
from kvkeep.step.checks import Entries, PlanError, check_span
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
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            key, value = key.contiguous(), value.contiguous()
        return [Span(key, value, 0, key.shape[1])]
    return key.spans if isinstance(key, JoinedSpans) else [Span(key, value, 0, key.shape[2])]


class Compiled(Entries):
    """Keys and values in the library's form. It has pointers to the tensors, and does not keep them."""

    __slots__ = ("addresses", "copies", "insert", "lane_bytes", "lies_densely", "pieces", "readable", "row_bytes")

    def __init__(self, field: str, keys: Any, values: Any) -> None:
        super().__init__(field, keys, values)
        self.copies: list[Tensor] = []  # made for the library
        self.readable, self.lies_densely, self.row_bytes = can_read(keys, values), False, (0, 0)
        if isinstance(keys, JoinedSpans):
            parts = [compiled(field, span.keys, span.values) for span in keys.spans]
            self.pieces = table_of(keys.spans, parts)
            return
        self.pieces = piece_table(1)
        if not self.coded:
            if self.device != torch.device("cpu") or keys.stride(-1) != 1 or values.stride(-1) != 1:
                raise PlanError(field, "has entries that are not on the CPU, or whose numbers lie apart")
            self._describe(self.pieces[0], keys, values)
        elif self.readable:
            _check_scales(field, keys, values)
            _BY_LAYOUT[keys.layout](self.pieces[0], keys, values, self.copies)
        self.addresses = self.pieces[0].keys or 0, self.pieces[0].values or 0  # without entries, they are 0

    def _describe(self, piece: KvPiece, keys: Tensor, values: Tensor) -> None:
        size = keys.itemsize
        piece.keys, piece.values, piece.lanes, piece.entries = keys.data_ptr(), values.data_ptr(), self.lanes, self.rows
        piece.key_lane_stride, piece.key_row_stride, _ = keys.stride()[-3:]
        piece.value_lane_stride, piece.value_row_stride, _ = values.stride()[-3:]
        self.row_bytes = size * piece.key_row_stride, size * piece.value_row_stride
        self.lane_bytes = size * piece.key_lane_stride, size * piece.value_lane_stride
        self.lies_densely = keys.is_contiguous() and values.is_contiguous()
        self.insert = KvInsert(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_lane_bytes=self.lane_bytes[0],
            key_bytes=size * self.dim,
            value_lane_bytes=self.lane_bytes[1],
            value_bytes=size * self.value_dim,
        )

    def narrow(self, piece: KvPiece, span: Span) -> None:
        """Let a copy of the piece begin and end with a span."""
        (keys, values), (key_bytes, value_bytes), start = self.addresses, self.row_bytes, span.start
        piece.keys, piece.values = keys + start * key_bytes, values + start * value_bytes
        piece.entries = span.stop - start


_COMPILED: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], Compiled]] = {}
"""By id of the keys, as long as they live: keys, values, and what was compiled of them."""


def compiled(field: str, keys: Any, values: Any) -> Compiled:
    """Return keys and values in the library's form, which is made once for the same tensors or codes. field: their name
    in messages. Raises PlanError where the library cannot use them."""
    number = id(keys)
    known = _COMPILED.get(number)
    if known is not None and known[0]() is keys and known[1]() is values:
        return known[2]
    made = Compiled(field, keys, values)
    _COMPILED[number] = weakref.ref(keys, lambda _: _COMPILED.pop(number, None)), weakref.ref(values), made
    return made


def table_of(spans: Sequence[Span], compiled: Sequence[Compiled]) -> Table:
    """Return the library's table of some spans, whose keys and values are ``compiled``."""
    table, number = piece_table(sum(len(one.pieces) for one in compiled)), 0
    for span, one in zip(spans, compiled, strict=True):
        if not one.readable:
            raise PlanError("attend", "has entries that the library does not read")
        check_span(span, one)
        copy_pieces(table, number, one.pieces)
        if span.start or span.stop != one.rows:
            one.narrow(table[number], span)
        number += len(one.pieces)
    return table


def _check_scales(field: str, keys: Any, values: Any) -> None:
    """Raise PlanError where scales or offsets of codes do not have the shape of the codes."""
    for part in (keys, values) if keys.layout != "sketched" else ():
        shape = part.codes.shape
        wanted = (*shape[:-1], 1) if keys.layout == "grouped" else (shape[0], 1, shape[2])
        if any(one.shape != wanted or one.dtype is not torch.float16 for one in (part.scale, part.offset)):
            raise PlanError(field, f"has codes {tuple(shape)} whose scales or offsets are not {wanted} float16")


def _contiguous(part: Tensor, copies: list[Tensor]) -> Tensor:
    """Return a tensor whose numbers lie in order. If it is a copy, it is appended to ``copies``."""
    if part.is_contiguous():
        return part
    copies.append(part.contiguous())
    return copies[-1]


def _describe_codes(row: KvPiece, keys: Any, values: Any, copies: list[Tensor]) -> None:
    row.lanes, _, row.entries, _ = keys.shape
    row.key_bits, row.value_bits, row.value_group = keys.bits, values.bits, values.width
    tensors = [
        part if part[:1].is_contiguous() else _contiguous(part, copies)
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
        channels = [_contiguous(part.expand(len(codes), -1, -1), copies) for part in (mean, values.deviation)]
        row.value_mean, row.value_deviation = (part.data_ptr() for part in channels)


def _describe_channels(row: KvPiece, keys: Any, values: Any, copies: list[Tensor]) -> None:
    row.lanes, _, row.entries, _ = keys.shape
    row.key_bits = row.value_bits = 8
    for name, part in (("key", keys), ("value", values)):
        setattr(row, f"{name}s", part.codes.data_ptr())
        setattr(row, f"{name}_lane_stride", part.codes.stride(0))
        setattr(row, f"{name}_row_stride", part.codes.stride(1))
        setattr(row, f"{name}_scale", part.scale.data_ptr())
        setattr(row, f"{name}_offset", part.offset.data_ptr())
        setattr(row, f"{name}_scale_stride", part.scale.stride(0))


def _describe_estimates(row: KvPiece, keys: Any, values: Any, copies: list[Tensor]) -> None:
    row.sums, row.lanes, row.entries = keys.at.shape
    row.use_median = keys.by == "median"
    places = keys.at.int().contiguous()
    copies.append(places)
    row.cell_indices = places.data_ptr()
    for name, part in (("key", keys), ("value", values)):
        cells = _contiguous(part.cells, copies)
        setattr(row, f"{name}s", cells.data_ptr())
        setattr(row, f"{name}_lane_stride", cells.stride(0))
    if keys.mean is not None:
        means = [part.mean.float().contiguous() for part in (keys, values)]
        copies += means
        row.key_mean, row.value_mean = (mean.data_ptr() for mean in means)


_BY_LAYOUT = {"grouped": _describe_codes, "by channel": _describe_channels, "sketched": _describe_estimates}
"""By layout: the function that fills a piece with the addresses of such codes."""
