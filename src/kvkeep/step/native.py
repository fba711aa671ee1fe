"""Executes steps by the native library: bits that depend on the entries alone, and on nothing about where they lie.

The library (native/attention.h) counts entries from a row's first token and goes through them in blocks of 512 in
order, so a query's result is the same to the bit whether it comes alone or with others, and wherever entries lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.native.library import kernels, library
from kvkeep.native.structures import (
    BLOCK_ENTRIES,
    MAX_DIM,
    PIECE_BYTES,
    TILE_ENTRIES,
    KvAttention,
    KvInsert,
    KvPiece,
    KvStep,
    Table,
    address,
    address_of,
    address_table,
    copy_piece,
    copy_pieces,
    piece_table,
)
from kvkeep.step.plan import Destination, LayerStep, Segment, Span

_ORDER = {"grouped": 0, "by channel": 1, "": 2, "spans": 2, "sketched": 3}
"""Of segments that are attended with scores, by their layout: tiles begin with codes in groups of a tile."""


# -- what the library takes ------------------------------------------------------------------------------


def runs(query: Tensor, keys: Any, values: Any) -> bool:
    """Return whether the library attends with these: bfloat16 on the CPU, heads of even width, and a library there."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu":
        return False
    kind = _plain if isinstance(keys, Tensor) else _KINDS.get(keys.layout, _nothing)
    return kind(keys, values) and takes(query.shape[-1], values.shape[-1]) and library() is not None


def inserts(step: LayerStep, keys: Tensor, values: Tensor) -> bool:
    """Return whether the library writes new entries, of any type of numbers, as a step says."""
    append, ranks = step.append, step.ranks
    return (
        append.keys.device.type == "cpu"
        and (ranks is None or ranks.dtype in (torch.float32, torch.int32))
        and (keys.dtype, values.dtype) == (append.keys.dtype, append.values.dtype)
        and append.keys.is_contiguous()
        and append.values.is_contiguous()
        and library() is not None
    )


def reads(keys: Tensor, values: Tensor) -> bool:
    """Return whether the library attends to entries in such tensors."""
    return _plain(keys, values) and takes(keys.shape[-1], values.shape[-1]) and library() is not None


def takes(key_dim: int, value_dim: int) -> bool:
    """Return whether the library takes heads of such widths: keys of an even one, and neither above MAX_DIM."""
    return key_dim % 2 == 0 and max(key_dim, value_dim) <= MAX_DIM


def joins(query: Tensor, segment: Segment) -> bool:
    """Return whether the library attends to a segment together with others."""
    mask, lanes = segment.mask, segment.lanes
    return (
        runs(query, segment.key, segment.value)
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
    """Return whether these are codes in groups of a tile."""
    return bool(values.width % 16 == 0)


def _by_channel(keys: Any, values: Any) -> bool:
    """Return whether these are codes of 8 bits with a scale for each channel."""
    return all(part.codes.dtype == torch.int8 and part.codes.shape[2] % 16 == 0 for part in (keys, values))


def _sketched(keys: Any, values: Any) -> bool:
    """Return whether these are estimates of as many sums as the kernel has a median for, or their mean."""
    return (keys.by == "mean" or len(keys.at) in (1, 3, 5)) and all(
        _bfloat16(part.cells) and part.cells.shape[2] % 16 == 0 for part in (keys, values)
    )


def _nothing(keys: Any, values: Any) -> bool:
    return False


_KINDS = {"spans": _in_spans, "grouped": _grouped, "by channel": _by_channel, "sketched": _sketched}
"""Which codes the library reads, by their layout."""


# -- a planned step -------------------------------------------------------------------------------------


def insert(step: LayerStep, keys: Tensor, values: Tensor) -> None:
    """Write the new entry of each lane, keys and values (lanes, dim), and copy the one that it evicts."""
    keys, values = keys.contiguous(), values.contiguous()
    compiled = _compiled(step)
    kernels().kvkeep_insert(address_of(compiled.struct.insert), len(keys), keys.data_ptr(), values.data_ptr())


def run(
    steps: Sequence[LayerStep], tokens: Sequence[int], query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Run one layer for a token of each of several sessions: write its entry, and return its attention, (1, row, heads,
    value_dim); that of tokens of no session is not set.

    steps, tokens: of each session, and its token's place in the row. query: (1, heads, row, dim). key, value: (1,
    kv_heads, row, dim).
    """
    heads, row = query.shape[1:3]
    query, key, value = query.transpose(1, 2).contiguous(), key.contiguous(), value.contiguous()
    output = torch.empty(1, row, heads, value.shape[3], dtype=torch.bfloat16)
    lse = torch.empty(row, heads)
    table = _step_table(steps, tokens)
    kernels().kvkeep_attend_sessions(
        address_of(table),
        len(steps),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        row,
        heads,
        False,
        scaling,
        output.data_ptr(),
        lse.data_ptr(),
    )
    return output


def run_layers(
    layers: Table, scaling: Table, steps: Sequence[Sequence[LayerStep]], x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Run all layers of a decoder for a token of each of several sessions; return what leaves the last one, (1, tokens,
    hidden).

    layers, scaling: the layers as the library has them, and the scaling of their attention. steps: of each layer, one
    for each token. x: (1, tokens, hidden), what enters the first layer. cos, sin: (tokens, dim).
    """
    x = x.clone(memory_format=torch.contiguous_format)
    tables = [_step_table(of_layer, range(len(of_layer))) for of_layer in steps]
    kernels().kvkeep_run_layers(
        address_of(layers),
        address_of(by_layer := address_table([address_of(table) for table in tables])),
        address_of(scaling),
        len(by_layer),
        x.shape[1],
        x.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        x.data_ptr(),
    )
    return x


def _step_table(steps: Sequence[LayerStep], tokens: Sequence[int]) -> Table:
    compiled = [_compiled(step) for step in steps]
    for one, token in zip(compiled, tokens, strict=True):
        one.struct.token = token
    return address_table([address_of(one.struct) for one in compiled])


def _compiled(step: LayerStep) -> _Compiled:
    """Return a step as the library takes it, up to date."""
    made = step.compiled
    if made is None or made.append is not step.append:
        made = step.compiled = _Compiled(step.append)
    made.update(step)
    return made


class _Compiled:
    """A :class:`LayerStep` as the library takes it: made once, and then changed where the step was."""

    def __init__(self, append: Destination) -> None:
        self.append = append
        keys, values = append.keys, append.values
        attention = KvAttention(
            lanes=len(keys), queries=1, dim=keys.shape[-1], value_dim=values.shape[-1], causal_offset=-1
        )
        self.struct = KvStep(attention, KvInsert())
        self._insert: KvInsert = self.struct.insert
        self._attention: KvAttention = self.struct.attention
        self._insert.keys, self._insert.values = keys.data_ptr(), values.data_ptr()
        self._insert.key_lane_bytes, self._insert.value_lane_bytes = (
            part.stride(0) * part.itemsize for part in (keys, values)
        )
        self._insert.key_bytes, self._insert.value_bytes = (part.shape[-1] * part.itemsize for part in (keys, values))
        self._table = SpanTable()

    def update(self, step: LayerStep) -> None:
        insert, append, evict, ranks = self._insert, step.append, step.evict, step.ranks
        insert.column, insert.new_slot = append.row, step.slot
        insert.slots, insert.scores = address(append.slots), address(append.scores)
        insert.extra, insert.newest = address(append.extra), address(append.newest)
        insert.new_scores = address(step.new_scores)
        insert.ranks = address(ranks)
        if append.slots is not None:
            insert.columns = append.slots.shape[1]
        if ranks is not None:
            insert.integer_ranks, insert.oldest_first = ranks.dtype == torch.int32, step.oldest
        if evict is None:
            insert.evicted_keys = None
        else:
            self._evict(evict)
        self.struct.received, self.struct.reduce_max = address(step.received), step.reduce == "max"
        self._table.show(self._attention, step.attend)

    def _evict(self, evict: Destination) -> None:
        insert, keys, values = self._insert, evict.keys, evict.values
        insert.evicted_key_lane_bytes = keys.stride(0) * keys.itemsize
        insert.evicted_value_lane_bytes = values.stride(0) * values.itemsize
        insert.evicted_keys = keys.data_ptr() + evict.row * keys.stride(1) * keys.itemsize
        insert.evicted_values = values.data_ptr() + evict.row * values.stride(1) * values.itemsize
        insert.evicted_slots, insert.evicted_scores = address(evict.slots), address(evict.scores)
        insert.evicted_extra, insert.evicted_newest = address(evict.extra), address(evict.newest)


class Settled:
    """Attention of a single query over spans that are settled, in as few calls as there are: made once for a layer, and
    then changed where its spans were."""

    def __init__(self) -> None:
        self._attention, self._table = KvAttention(queries=1, causal_offset=-1), SpanTable()

    def attend(
        self, query: Tensor, spans: Sequence[Span], scaling: float, reduce: str, first: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention, (lanes, heads, 1, value_dim), and with ``reduce`` what the entries of ``spans[first:]``
        received, (lanes, n) float32. query: (lanes, heads, 1, dim)."""
        query, attention = query.contiguous(), self._attention
        lanes, groups, _, dim = query.shape
        value_dim = spans[-1].values.shape[-1]
        attention.query, attention.lanes, attention.groups, attention.dim = query.data_ptr(), lanes, groups, dim
        attention.value_dim, attention.scaling = value_dim, scaling
        self._table.show(attention, spans)
        output, lse = query.new_empty(lanes, groups, 1, value_dim), torch.empty(lanes, groups, 1)
        kernels().kvkeep_attend(address_of(attention), output.data_ptr(), False, lse.data_ptr(), None, False)
        if not reduce:
            return output, None
        if first:  # those alone whose attention is wanted
            attention.pieces += first * PIECE_BYTES
            attention.piece_count -= first
            attention.entries = sum(span.entries for span in spans[first:])
        received = torch.empty(lanes, attention.entries)
        kernels().kvkeep_received(address_of(attention), lse.data_ptr(), 1, reduce == "max", received.data_ptr())
        return output, received


class SpanTable:
    """Spans as the library reads them, changed where they were."""

    def __init__(self) -> None:
        self._spans: list[tuple[Span, int, int]] = []
        self._table: Table = piece_table(0)

    def show(self, attention: KvAttention, spans: Sequence[Span]) -> None:
        """Let ``attention`` be of these spans."""
        if len(spans) != len(self._spans):
            self._table, self._spans = piece_table(len(spans)), [(span, -1, -1) for span in spans]
        entries = 0
        for number, span in enumerate(spans):
            known, start, stop = self._spans[number]
            entries += span.stop - span.start
            if known is not span or start != span.start or stop != span.stop:
                copy_piece(self._table, number, _piece_of(span))
                self._spans[number] = span, span.start, span.stop
        attention.pieces, attention.piece_count, attention.entries = address_of(self._table), len(spans), entries


# -- entries as the library reads them ---------------------------------------------------------------------


class Pieces:
    """Entries where they lie, as the library reads them. rows: its table of them. entries: how many there are."""

    def __init__(self, key: Any, value: Any) -> None:
        self._tensors: list[Tensor] = []  # what the table points to
        if getattr(key, "layout", "") == "spans":
            self.rows = piece_table(len(key.spans))
            for number, span in enumerate(key.spans):
                copy_piece(self.rows, number, _piece_of(span))
        else:
            self.rows = piece_table(1)
            self._tensors = _describe(self.rows[0], key, value)
        self.value_dim: int = value.shape[-1]
        self.entries = sum(row.entries for row in self.rows)


def _piece_of(span: Span) -> KvPiece:
    """Return a span as the library reads it, up to date."""
    if span.compiled is None:
        piece, rows = KvPiece(), (0, 0)
        tensors = _describe(piece, span.keys, span.values)
        if isinstance(span.keys, Tensor):
            rows = tuple(part.stride(1) * part.itemsize for part in (span.keys, span.values))  # type: ignore[assignment]
        span.compiled = piece, tensors, (piece.keys, piece.values), rows
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


# -- attention over segments ----------------------------------------------------------------------------


class Call:
    """The arguments of one attention: ``pieces`` in the order of the text, as keys and values or as the library reads
    them; fewer lanes are read in turns. Codes in groups of 32 entries come before all others.

    query: (lanes, groups, queries, dim). past: query m sees entries before past + m + 1; None: all. first, stop: the
    entries that each lane sees, (lanes,) ints. shift: what is added to the number of an entry for its place in blocks,
    (lanes,) ints: minus the padding before a row, plus what lies before the first entry given. mask: (lanes or 1,
    queries or 1, entries) bool, True is seen.
    """

    def __init__(
        self,
        query: Tensor,
        pieces: Sequence[Pieces | tuple[Any, Any]],
        scaling: float,
        past: int | None = None,
        first: Tensor | None = None,
        stop: Tensor | None = None,
        shift: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        lanes, groups, queries, dim = query.shape
        self.query = query.contiguous()
        self._parts = [piece if isinstance(piece, Pieces) else Pieces(*piece) for piece in pieces]
        self.value_dim = self._parts[0].value_dim
        self.bounds = [None if part is None else part.int().contiguous() for part in (first, stop, shift)]
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self._rows = rows = piece_table(sum(len(table.rows) for table in self._parts))
        copy_pieces(rows, [table.rows for table in self._parts])
        self.entries = sum(table.entries for table in self._parts)
        self.struct = KvAttention(
            self.query.data_ptr(),
            address_of(rows),
            *map(address, self.bounds),
            address(self.mask),
            lanes,
            groups,
            queries,
            dim,
            self.value_dim,
            len(rows),
            self.entries,
            -1 if past is None else past,
            0 if self.mask is None or len(self.mask) == 1 else self.mask.stride(0),
            0 if self.mask is None or self.mask.shape[1] == 1 else self.mask.stride(1),
            scaling,
        )

    def attend(
        self, dtype: torch.dtype = torch.bfloat16, state: Tensor | None = None, resumes: bool = False, last: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return the output (lanes, groups, queries, value_dim) in ``dtype`` (bfloat16 or float32), and the log-sum-exp
        of scores (lanes, groups, queries) float32; zeros and -inf for a query that sees nothing.

        state: made by :meth:`new_state`, where an attention takes several calls of whole blocks; a later call
        ``resumes`` it, and one that is not the ``last`` returns None.
        """
        output = torch.empty(*self.query.shape[:3], self.value_dim, dtype=dtype) if last else None
        lse = torch.empty(self.query.shape[:3], dtype=torch.float32) if last else None
        kernels().kvkeep_attend(
            address_of(self.struct),
            address(output),
            dtype == torch.float32,
            address(lse),
            address(state),
            resumes,
        )
        return None if output is None or lse is None else (output, lse)

    def new_state(self) -> Tensor:
        """Return room for the state of an attention in several calls."""
        return torch.empty(self.query.shape[:3].numel() * (2 + self.value_dim), dtype=torch.float32)

    def received(self, lse: Tensor, last: int | None = None, greatest: bool = False) -> Tensor:
        """Return the attention each entry received of the ``last`` queries, (lanes, entries) float32: summed, mean over
        the groups, or with ``greatest`` the maximum over both. lse: as :meth:`attend` returned it, over all entries."""
        lse = lse.contiguous()
        out = torch.empty(len(self.query), self.entries, dtype=torch.float32)
        queries = self.query.shape[2]
        wanted = queries if last is None else min(last, queries)
        kernels().kvkeep_received(address_of(self.struct), lse.data_ptr(), wanted, greatest, out.data_ptr())
        return out


class Run:
    """Attention over entries that come in pieces, in the order of the text, in as few calls as memory allows.

    What is there anyhow is collected for one call. What was formed for the moment is attended at once, in whole blocks;
    those entries of it that begin a further block are kept, copied, until that is whole. origin: as :class:`Call`'s
    ``first``, counted from the first piece; blocks are counted from it.
    """

    def __init__(self, query: Tensor, scaling: float, origin: Tensor | None = None) -> None:
        self.query, self.scaling = query, scaling
        self._origin = origin
        self._pieces: list[Pieces | tuple[Any, Any]] = []
        self._masks: list[tuple[int, Tensor | None]] = []
        self._newest: tuple[Tensor, Tensor] | None = None  # entries of which query i sees the first i + 1
        self._grouped = 0  # pieces that are codes in groups
        self._state: Tensor | None = None
        self._start = 0  # the entries before those at hand
        self._skipped: Tensor | None = None  # of those at hand, what each lane attended already

    def __bool__(self) -> bool:
        return bool(self._pieces) or self._newest is not None or self._state is not None

    def add(self, key: Any, value: Any, mask: Tensor | None, causal: bool, formed: bool) -> None:
        """Add entries (lanes, n, dim) with a mask (lanes or 1, queries or 1, n) bool, or None. causal: as of a
        Segment; they come after all others. formed: they are not kept anywhere else."""
        if causal:
            self._newest = key, value
            return
        if not isinstance(key, Tensor):
            grouped = key.layout == "grouped"
            at = self._grouped if grouped else len(self._pieces)
            self._pieces.insert(at, Pieces(key, value))
            self._masks.insert(at, (key.shape[2], mask))
            self._grouped += grouped
            if key.layout != "spans":
                self._origin = None
            return
        self._pieces.append((key, value))
        self._masks.append((key.shape[1], mask))
        if formed:
            self._attend_blocks()

    def output(self) -> tuple[Tensor, Tensor]:
        """Attend to what is left, and return output and log-sum-exp, float32 both."""
        done = self._call(True).attend(torch.float32, self._state, self._start > 0)
        assert done is not None
        return done

    def scored(self, greatest: bool) -> tuple[Tensor, Tensor]:
        """Return the output, bfloat16, and the attention each entry received, (lanes, entries), as
        :meth:`Call.received`."""
        call = self._call(True)
        done = call.attend()
        assert done is not None
        return done[0], call.received(done[1], None, greatest)

    def received(self, lse: Tensor, last: int | None, greatest: bool) -> Tensor:
        """Return the attention that each entry received, (lanes, entries), by a log-sum-exp over more than these."""
        return self._call(True).received(lse, last, greatest)

    def _call(self, last: bool, stop: Tensor | None = None) -> Call:
        entries, pieces = sum(count for count, _ in self._masks), self._pieces
        newest = 0
        if last and self._newest is not None:
            newest, pieces = self._newest[0].shape[1], [*pieces, self._newest]
        if not pieces:  # whole blocks, attended already
            pieces = [self._nothing()]
        mask = self._mask(entries, newest)
        past = entries if newest and mask is None else None
        shift = None
        if self._start or self._origin is not None:
            shift = self._start - (self._origin if self._origin is not None else torch.zeros(1, dtype=torch.int64))
            shift = shift.expand(len(self.query))
        return Call(self.query, pieces, self.scaling, past, self._skipped, stop, shift, mask)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        assert self._state is not None
        lanes, *_, dim = self.query.shape
        value_dim = len(self._state) // self.query.shape[:3].numel() - 2
        return self.query.new_empty(lanes, 0, dim), self.query.new_empty(lanes, 0, value_dim)

    def _mask(self, entries: int, newest: int) -> Tensor | None:
        if all(mask is None for _, mask in self._masks):
            return None
        queries = self.query.shape[2]
        lanes = max(len(mask) for _, mask in self._masks if mask is not None)
        rows = queries if newest or any(mask is not None and mask.shape[1] > 1 for _, mask in self._masks) else 1
        seen = torch.ones(lanes, rows, entries + newest, dtype=torch.bool)
        start = 0
        for count, mask in self._masks:
            if mask is not None:
                seen[..., start : start + count] = mask
            start += count
        if newest:
            seen[..., entries:] = torch.ones(queries, newest, dtype=torch.bool).tril()
        return seen

    def _attend_blocks(self) -> None:
        """Attend to the whole blocks at hand, and keep a copy of what lies behind them."""
        entries = sum(count for count, _ in self._masks)
        origin = torch.zeros(1, dtype=torch.int64) if self._origin is None else self._origin
        blocks = (self._start + entries - origin) // BLOCK_ENTRIES * BLOCK_ENTRIES + origin - self._start
        stop = blocks.clamp(0, entries)
        low = int(stop.min())
        if not low:
            self._keep(0)
            return
        call = self._call(False, stop.expand(len(self.query)))
        if self._state is None:
            self._state = call.new_state()
        call.attend(state=self._state, resumes=self._start > 0, last=False)
        self._keep(low)
        self._start += low
        self._skipped = (stop - low).expand(len(self.query)) if len(stop) > 1 else None

    def _keep(self, low: int) -> None:
        """Copy what lies behind the first ``low`` entries, of pieces as of masks."""
        pieces, masks = self._pieces, self._masks
        self._pieces, self._masks = [], []
        for pair, (count, mask) in zip(pieces, masks, strict=True):
            assert not isinstance(pair, Pieces)  # nothing is formed behind codes
            if (cut := min(low, count)) < count:
                keys, values = (part[:, cut:].clone() for part in pair)
                self._pieces.append((keys, values))
                self._masks.append((count - cut, None if mask is None else mask[..., cut:]))
            low -= cut


def in_order(segment: Segment) -> tuple[Any, Any, Tensor | None]:
    """Return keys, values and mask of a segment without the axis of heads, of all lanes in order."""
    mask = None if segment.mask is None else segment.mask[:, 0]
    if not isinstance(segment.key, Tensor):
        return segment.key, segment.value, mask
    key, value = segment.key[:, 0], segment.value[:, 0]
    if segment.lanes is None:
        return key, value, mask
    order = segment.lanes.argsort()
    return key[order], value[order], mask if mask is None or len(mask) == 1 else mask[order]


def scored(query: Tensor, segments: Sequence[Segment], scaling: float, reduce: str) -> tuple[Tensor, list[Tensor]]:
    """Return attention of a single query over segments, and the weights of each segment's entries, as
    :func:`kvkeep.attention.attend_scored`; only where every segment :func:`joins`."""
    run, order = Run(query, scaling), sorted(range(len(segments)), key=lambda at: _ORDER[_layout(segments[at].key)])
    for at in order:
        run.add(*in_order(segments[at]), False, False)
    output, weights = run.scored(reduce == "max")
    parts = dict(zip(order, weights.split([segments[at].key.shape[-2] for at in order], 1), strict=True))
    return output, [parts[at] for at in range(len(segments))]


def received(
    query: Tensor, segment: Segment, lse: Tensor, scaling: float, last: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Return the attention that each entry of a segment received, as :func:`kvkeep.attention.received`; only where it
    :func:`joins`."""
    run = Run(query, scaling)
    run.add(*in_order(segment), segment.causal, False)
    weights = run.received(lse, last, reduce == "max")
    return weights if segment.lanes is None else weights[segment.lanes]


def _layout(key: Any) -> str:
    return "" if isinstance(key, Tensor) else key.layout


def attend_all(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, start: int, first: Tensor | None
) -> Tensor | None:
    """Return attention over all entries of a layer at once, (batch, heads, queries, value_dim); None where the kernel
    does not run.

    query: (batch, heads, queries, dim). key, value: (batch, kv_heads, entries, dim), slots ``start`` .. of the text,
    the queries' own last. mask: bool, (batch or 1, 1, queries, entries); None: causal. first: the first slot of each
    row that is not padding, (batch,); None without padding.
    """
    if not runs(query, key, value) or (mask is not None and (mask.dtype != torch.bool or mask.shape[1] > 1)):
        return None
    batch, heads, queries, dim = query.shape
    kv_heads, entries = key.shape[1:3]
    grouped = query.reshape(batch * kv_heads, heads // kv_heads, queries, dim)
    lanes = (key.flatten(0, 1), value.flatten(0, 1))
    if mask is not None:
        mask = mask.expand(-1, -1, queries, -1)[:, 0]
        mask = mask if len(mask) == 1 else mask.repeat_interleave(kv_heads, 0)
    seen = shift = None
    if start or first is not None:
        origin = torch.zeros(batch, dtype=torch.int64) if first is None else first
        shift = (start - origin).repeat_interleave(kv_heads)
        seen = (-shift).clamp(min=0) if mask is None else None
    past = entries - queries if mask is None else None
    done = Call(grouped, [lanes], scaling, past, seen, None, shift, mask).attend()
    assert done is not None
    return done[0].view(batch, heads, queries, -1)
