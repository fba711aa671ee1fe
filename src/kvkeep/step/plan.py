"""A step as data: where a new entry of each lane is written, which entry it evicts, what its query attends to, and
which attention is recorded.

:class:`LayerStep` describes the work of one decoded token in one layer before it is executed. Other tokens attend over
:class:`Segment`, which may be masked or coded: those of prompts and padded batches, and those whose attention depends
on how a store encodes the evicted entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Coded(Protocol):
    """Coded keys or values that compute products without decoding."""

    layout: ClassVar[str]
    """How the native library reads them: "grouped" (``stores/evicted/coded.py``: codes, scale and offset of 32
    entries), "by channel" (``waiting.py``: codes of entries), "sketched" (``sketch.py``: places in cells) or "spans"
    (:class:`JoinedSpans`); empty: the library cannot read them."""

    def scores(self, query: Tensor) -> Tensor:
        """Return the products of keys with ``query`` (batch, rows, dim): (batch, rows, entries) float32."""

    def mix(self, weights: Tensor) -> Tensor:
        """Return the sums of values weighted by ``weights`` (batch, rows, entries): (batch, rows, dim) float32."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Decode them: (batch, entries, dim)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys and values, and which queries see each of them."""

    key: Any
    """(batch, kv_heads, entries, key_dim), or :class:`Coded` with a single KV head."""
    value: Any
    """(batch, kv_heads, entries, value_dim), or coded like the key."""
    mask: Tensor | None = None
    """Bool (True: seen) or additive float, broadcastable to (batch, 1, queries, entries); None: every query sees every
    entry."""
    causal: bool = False
    """Query i sees entries 0..i. The numbers of queries and entries are then equal, and there is no mask."""
    lanes: Tensor | None = None
    """The rows of the query's batch that read this segment, (the segment's batch,) int64; None: all."""
    formed: bool = False
    """Key and value are temporary: they were made for this attention."""


@dataclass(eq=False)
class Span:
    """Consecutive rows of two tensors; every query sees all of these entries."""

    keys: Any
    """(lanes, rows, key_dim), or :class:`Coded`."""
    values: Any
    """(lanes, rows, value_dim), or coded like the keys."""
    start: int
    """The first row; 0 if the entries are coded."""
    stop: int
    """The row behind the last one."""
    compiled: Any = field(default=None, repr=False)
    """The native executor's form of the span, which the executor keeps up to date."""

    @property
    def entries(self) -> int:
        """The number of entries."""
        return self.stop - self.start

    def segment(self) -> Segment:
        """Return the span as a segment."""
        if not isinstance(self.keys, Tensor):
            return Segment(self.keys, self.values)
        rows = slice(self.start, self.stop)
        return Segment(self.keys[:, None, rows], self.values[:, None, rows])


class JoinedSpans:
    """Several spans as the keys of one segment; :attr:`values` are its values."""

    layout: ClassVar[str] = "spans"

    def __init__(self, spans: Sequence[Span], name: str = "keys") -> None:
        self.spans, self._name = spans, name

    @property
    def values(self) -> JoinedSpans:
        """The values of the spans."""
        return JoinedSpans(self.spans, "values")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(lanes, 1, entries, dim)."""
        rows: Tensor = getattr(self.spans[0], self._name)
        return len(rows), 1, sum(span.entries for span in self.spans), rows.shape[-1]

    def narrowed(self, first: int, stop: int) -> JoinedSpans:
        """Return the entries from ``first`` to ``stop``, without a copy."""
        spans, place = list[Span](), 0
        for span in self.spans:
            low, high = max(first - place, 0), min(stop - place, span.entries)
            if low < high:
                spans.append(Span(span.keys, span.values, span.start + low, span.start + high))
            place += span.entries
        return JoinedSpans(spans, self._name)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the keys, or the values, as one tensor (lanes, entries, dim)."""
        return torch.cat([getattr(one, self._name)[:, one.start : one.stop] for one in self.spans], 1).to(dtype)


@dataclass(eq=False)
class Destination:
    """The row to which one entry of each lane is written. Its tensors stay where they are."""

    keys: Tensor
    """(lanes, rows, key_dim)"""
    values: Tensor
    """(lanes, rows, value_dim)"""
    row: int = 0
    """The row's number, the same for all lanes."""
    slots: Tensor | None = None
    """(lanes, rows) int32, the slot of each entry; None: slots are not needed."""
    scores: Tensor | None = None
    """(lanes, rows) float32; None: entries have no scores."""
    extra: Tensor | None = None
    """(lanes, rows) float32, the number of other tokens merged into an entry; None: nothing was merged."""
    newest: Tensor | None = None
    """(lanes, rows) int32, the last slot merged into an entry; None: nothing was merged."""


@dataclass(eq=False)
class LayerStep:
    """The step of one decoded token of a sequence in one layer: its entry is written, and its query attends.

    A part may keep the step and change it for the next token; executors only read it.
    """

    append: Destination
    """Where the new entry is written; the entry in that row is evicted."""
    slot: int = 0
    """The slot of the new entry."""
    ranks: Tensor | None = None
    """(lanes, rows) float32 or int32. The new entry takes the row of lowest rank; rows with slot -1 come first. None:
    it takes ``append.row``."""
    oldest: bool = False
    """Among rows of equal rank, the one with the lowest slot is taken; otherwise the first."""
    new_scores: Tensor | None = None
    """(lanes,) float32, the scores of the new entry; None: 0."""
    evict: Destination | None = None
    """Where the evicted entry is copied to; its slot, score and counts are (lanes, 1) each. None: it is discarded."""
    attend: Sequence[Span] = ()
    """The entries that the query attends to after its entry is written, in this order."""
    seen: Tensor | None = None
    """(lanes, columns) bool, one column for each place of :attr:`attend`, or more: False where the place is empty.
    None: no place is empty."""
    reduce: str = ""
    """How the attention that entries receive is combined over the heads of a lane: "sum" (their mean) or "max"; empty:
    it is not computed."""
    received: Tensor | None = None
    """(lanes, entries) float32; the executor writes that attention here."""
    first_lane: int = 0
    """The first of its lanes among the KV heads of the token."""
    others: Sequence[LayerStep] = ()
    """The steps of the token's other lanes, if lanes have different numbers of entries; they have no others."""
    compiled: Any = field(default=None, repr=False)
    """The native executor's form of the step, which the executor keeps up to date."""

    @property
    def parts(self) -> Sequence[LayerStep]:
        """This step, and those of the other lanes."""
        return (self, *self.others) if self.others else (self,)

    @property
    def token_lanes(self) -> int:
        """The number of lanes of all parts."""
        return sum(len(part.append.keys) for part in self.parts)

    @property
    def entries(self) -> int:
        """The number of entries that the query attends to, and of empty places between them."""
        return sum(span.entries for span in self.attend)

    def segments(self) -> list[Segment]:
        """Return :attr:`attend` as segments, with :attr:`seen` as their masks."""
        segments = [span.segment() for span in self.attend]
        if self.seen is None:
            return segments
        masks = self.seen[:, None, None, : self.entries].split([span.entries for span in self.attend], -1)
        return [replace(segment, mask=mask) for segment, mask in zip(segments, masks, strict=True)]
