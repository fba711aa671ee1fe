"""Attention over segments by the native library, in as few calls as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.native.library import kernels
from kvkeep.native.structures import BLOCK_ENTRIES, KvAttention, address_of, array, rows
from kvkeep.step.native.entries import can_attend, spans_of, table_of
from kvkeep.step.plan import Segment, Span
from kvkeep.step.scores import cap_of

_ORDER = {"grouped": 0, "by channel": 1, "": 2, "spans": 2, "sketched": 3}
"""The order of segments in scored attention, by layout: tiles begin with codes in groups of a tile."""


class Call:
    """The arguments of one attention: ``spans`` in the order of the text, codes in groups of 32 entries first. Lane l
    of the query reads lane l mod n of a span with n lanes.

    query: (lanes, groups, queries, dim). past: query m sees entries before past + m + 1; None: all. first, stop: the
    range of entries that each lane sees, (lanes,) ints. shift: (lanes,) ints that are added to the number of an entry
    to find its place in blocks: the entries before the first given one, minus the padding before the row. mask: (lanes
    or 1, queries or 1, entries) bool, True is seen. sinks: of each head of a row, (heads,) float32. window: how many
    entries before past + m + 1 a query sees, the last ones; None: all.
    """

    def __init__(
        self,
        query: Tensor,
        spans: Sequence[Span],
        scaling: float,
        past: int | None = None,
        first: Tensor | None = None,
        stop: Tensor | None = None,
        shift: Tensor | None = None,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        lanes, groups, queries, dim = query.shape
        self.query = query.contiguous()
        self.value_dim: int = spans[0].values.shape[-1]
        self.bounds = [None if part is None else part.int().contiguous() for part in (first, stop, shift)]
        self.mask = None if mask is None else mask.contiguous()
        self._spans, self._table, self._sinks = spans, table_of(spans), sinks  # the library reads them
        self.entries = sum(span.entries for span in spans)
        self.struct = KvAttention(
            array(self.query),
            address_of(self._table),
            *map(array, self.bounds),
            rows(self.mask),
            array(sinks),
            lanes,
            groups,
            queries,
            dim,
            self.value_dim,
            len(self._table),
            self.entries,
            -1 if past is None else past,
            window or 0,
            scaling,
            cap_of(scaling),
        )

    @staticmethod
    def reads(query: Tensor, keys: Any, values: Any) -> bool:
        """Return whether the library attends with these tensors."""
        return can_attend(query, keys, values)

    def attend(
        self, dtype: torch.dtype = torch.bfloat16, state: Tensor | None = None, resumes: bool = False, last: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return the output (lanes, groups, queries, value_dim) in ``dtype`` (bfloat16 or float32), and the log-sum-exp
        of scores (lanes, groups, queries) float32; zeros and -inf for a query that sees no entry.

        state: made by :meth:`new_state`, where an attention takes several calls of whole blocks. A later call
        ``resumes`` it. Only the ``last`` call returns a result; the others return None.
        """
        output = torch.empty(*self.query.shape[:3], self.value_dim, dtype=dtype) if last else None
        lse = torch.empty(self.query.shape[:3], dtype=torch.float32) if last else None
        kernels().kvkeep_attend(address_of(self.struct), output, lse, state, resumes)
        return None if output is None or lse is None else (output, lse)

    def new_state(self) -> Tensor:
        """Return an empty state for an attention in several calls."""
        return torch.empty(self.query.shape[:3].numel() * (2 + self.value_dim), dtype=torch.float32)

    def received(self, lse: Tensor, last: int | None = None, greatest: bool = False) -> Tensor:
        """Return the attention that each entry received from the ``last`` queries, (lanes, entries) float32: the sum
        over queries of the mean over the groups, or with ``greatest`` the maximum over both. lse: from :meth:`attend`,
        over all entries."""
        out = torch.empty(len(self.query), self.entries, dtype=torch.float32)
        queries = self.query.shape[2]
        wanted = queries if last is None else min(last, queries)
        kernels().kvkeep_received(address_of(self.struct), lse.contiguous(), wanted, greatest, out)
        return out


class CollectedAttention:
    """Attention over entries that arrive in pieces, in the order of the text, in as few calls as memory allows.

    Stored entries are collected for one call. Entries that were formed for this attention are attended at once, in
    whole blocks; the entries of an incomplete block are copied until the block is complete. origin: the first entry
    that each lane sees, (lanes,) ints, counted from the first piece; blocks are counted from it. sinks: of each head of
    a row, (heads,) float32.
    """

    call_type: ClassVar[Any] = Call
    """What attends. Another executor has its own."""

    def __init__(
        self, query: Tensor, scaling: float, origin: Tensor | None = None, sinks: Tensor | None = None
    ) -> None:
        self.query, self.scaling, self.sinks = query, scaling, sinks
        self._origin = origin
        self._spans: list[Span] = []
        self._masks: list[tuple[int, Tensor | None]] = []
        self._newest: Span | None = None  # query i attends to its first i + 1 entries
        self._grouped = 0  # spans that are codes in groups
        self._state: Tensor | None = None
        self._start = 0  # entries before the collected ones
        self._skipped: Tensor | None = None  # number of collected entries that each lane attended to

    def __bool__(self) -> bool:
        return bool(self._spans) or self._newest is not None or self._state is not None

    def add(self, key: Any, value: Any, mask: Tensor | None, causal: bool, formed: bool) -> None:
        """Add entries (lanes, n, dim) with a mask (lanes or 1, queries or 1, n) bool, or None. causal, formed: those of
        the :class:`Segment`; causal entries come after all others."""
        spans = spans_of(key, value)
        if causal:
            (self._newest,) = spans
            return
        layout, counts = _layout(key), [span.entries for span in spans]
        at = self._grouped if layout == "grouped" else len(self._spans)
        self._spans[at:at] = spans
        self._masks[at:at] = zip(counts, [None] * len(counts) if mask is None else mask.split(counts, -1), strict=True)
        self._grouped += layout == "grouped"
        if layout not in ("", "spans"):
            self._origin = None
        elif formed:
            self._attend_blocks()

    def output(self) -> tuple[Tensor, Tensor]:
        """Attend to the remaining entries, and return output and log-sum-exp, float32 both."""
        done = self._call(True).attend(torch.float32, self._state, self._start > 0)
        assert done is not None
        return done

    def scored(self, greatest: bool) -> tuple[Tensor, Tensor]:
        """Return the output, bfloat16, and the attention that each entry received, (lanes, entries)
        (:meth:`Call.received`)."""
        call = self._call(True)
        done = call.attend()
        assert done is not None
        return done[0], call.received(done[1], None, greatest)

    def received(self, lse: Tensor, last: int | None, greatest: bool) -> Tensor:
        """Return the attention that each entry received, (lanes, entries). lse: over these entries, perhaps also over
        others."""
        return self._call(True).received(lse, last, greatest)

    def _call(self, last: bool, stop: Tensor | None = None) -> Any:
        entries, spans, newest = sum(count for count, _ in self._masks), self._spans, 0
        if last and self._newest is not None:
            newest, spans = self._newest.entries, [*spans, self._newest]
        if not spans:  # all entries were attended in complete blocks
            spans = [self._nothing()]
        mask = self._mask(entries, newest)
        past = entries if newest and mask is None else None
        shift = None
        if self._start or self._origin is not None:
            shift = self._start - (self._origin if self._origin is not None else torch.zeros(1, dtype=torch.int64))
            shift = shift.expand(len(self.query))
        return self.call_type(self.query, spans, self.scaling, past, self._skipped, stop, shift, mask, self.sinks)

    def _nothing(self) -> Span:
        assert self._state is not None
        lanes, *_, dim = self.query.shape
        value_dim = len(self._state) // self.query.shape[:3].numel() - 2
        return Span(self.query.new_empty(lanes, 0, dim), self.query.new_empty(lanes, 0, value_dim), 0, 0)

    def _mask(self, entries: int, newest: int) -> Tensor | None:
        if all(mask is None for _, mask in self._masks):
            return None
        queries = self.query.shape[2]
        lanes = max(len(mask) for _, mask in self._masks if mask is not None)
        rows = queries if newest or any(mask is not None and mask.shape[1] > 1 for _, mask in self._masks) else 1
        seen = self.query.new_ones(lanes, rows, entries + newest, dtype=torch.bool)
        start = 0
        for count, mask in self._masks:
            if mask is not None:
                seen[..., start : start + count] = mask
            start += count
        if newest:
            seen[..., entries:] = seen.new_ones(queries, newest).tril()
        return seen

    def _attend_blocks(self) -> None:
        """Attend to the complete blocks, and keep a copy of the entries behind them."""
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
        """Copy the spans and masks behind the first ``low`` entries."""
        spans, masks = self._spans, self._masks
        self._spans, self._masks = [], []
        for span, (count, mask) in zip(spans, masks, strict=True):
            if (cut := min(low, count)) < count:
                keys, values = (part[:, span.start + cut : span.stop].clone() for part in (span.keys, span.values))
                self._spans.append(Span(keys, values, 0, count - cut))
                self._masks.append((count - cut, None if mask is None else mask[..., cut:]))
            low -= cut


def in_order(segment: Segment) -> tuple[Any, Any, Tensor | None]:
    """Return keys, values and mask of a segment for all lanes in order, without the axis of heads."""
    mask = None if segment.mask is None else segment.mask[:, 0]
    if not isinstance(segment.key, Tensor):
        return segment.key, segment.value, mask
    key, value = segment.key[:, 0], segment.value[:, 0]
    if segment.lanes is None:
        return key, value, mask
    order = segment.lanes.argsort()
    return key[order], value[order], mask if mask is None or len(mask) == 1 else mask[order]


def scored(
    query: Tensor, segments: Sequence[Segment], scaling: float, reduce: str, sinks: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return attention of a single query over segments, and the weights of each segment's entries, as
    :func:`kvkeep.attention.attend_scored`; only where every segment :func:`can_join`."""
    run = CollectedAttention(query, scaling, sinks=sinks)
    order = sorted(range(len(segments)), key=lambda at: _ORDER[_layout(segments[at].key)])
    for at in order:
        run.add(*in_order(segments[at]), False, False)
    output, weights = run.scored(reduce == "max")
    parts = dict(zip(order, weights.split([segments[at].key.shape[-2] for at in order], 1), strict=True))
    return output, [parts[at] for at in range(len(segments))]


def received(
    query: Tensor, segment: Segment, lse: Tensor, scaling: float, last: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Return the attention that each entry of a segment received, as :func:`kvkeep.attention.received`; only where it
    :func:`can_join`."""
    run = CollectedAttention(query, scaling)
    run.add(*in_order(segment), segment.causal, False)
    weights = run.received(lse, last, reduce == "max")
    return weights if segment.lanes is None else weights[segment.lanes]


def attend_all(
    query: Tensor,
    pieces: Sequence[tuple[Tensor, Tensor]],
    mask: Tensor | None,
    scaling: float,
    start: int,
    first: Tensor | None,
    sinks: Tensor | None = None,
    window: int | None = None,
    call: Any = Call,
) -> Tensor | None:
    """Return attention over all entries of a layer at once, (batch, heads, queries, value_dim); None where the kernel
    does not run.

    query: (batch, heads, queries, dim). pieces: keys and values in order, (batch, kv_heads, n, dim) each, of the slots
    of the text from ``start`` on; the last ones are the queries' slots. mask: bool, (batch or 1, 1, queries, entries);
    None: causal. first: the first slot of each row that is not padding, (batch,); None without padding. sinks: of each
    head, (heads,) float32. window: how many slots a query sees without a mask, its own and those before it; None: all.
    call: what attends.
    """
    if not all(call.reads(query, *piece) for piece in pieces) or (
        mask is not None and (mask.dtype != torch.bool or mask.shape[1] > 1)
    ):
        return None
    batch, heads, queries, dim = query.shape
    kv_heads, entries = pieces[0][0].shape[1], sum(keys.shape[2] for keys, _ in pieces)
    grouped = query.reshape(batch * kv_heads, heads // kv_heads, queries, dim)
    spans = [span for keys, values in pieces for span in spans_of(keys.flatten(0, 1), values.flatten(0, 1))]
    if mask is not None:
        mask = mask.expand(-1, -1, queries, -1)[:, 0]
        mask = mask if len(mask) == 1 else mask.repeat_interleave(kv_heads, 0)
    seen = shift = None
    if start or first is not None:
        origin = torch.zeros(batch, dtype=torch.int64) if first is None else first
        shift = (start - origin).repeat_interleave(kv_heads)
        seen = (-shift).clamp(min=0) if mask is None else None
    past, window = (entries - queries, window) if mask is None else (None, None)
    done = call(grouped, spans, scaling, past, seen, None, shift, mask, sinks, window).attend(query.dtype)
    assert done is not None
    output: Tensor = done[0]
    return output.view(batch, heads, queries, -1)


def _layout(key: Any) -> str:
    return "" if isinstance(key, Tensor) else key.layout
