"""A step as data: where a new entry of each lane is written, which entry it evicts, what its query attends to, and
which attention is recorded.

:class:`LayerStep` describes the work of one decoded token in one layer before it is executed, or of several tokens
whose entries take rows one after the other. Other tokens attend over :class:`Segment`, which may be masked or coded:
those of prompts and padded batches, and those whose attention depends on how a store encodes the evicted entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor


class Coded(Protocol):
    """Coded keys or values that compute products without decoding."""

    layout: ClassVar[str]
    """How the native library reads them: "grouped" (``stores/evicted/coded.py``: codes, scale and offset of 32
    entries), "by channel" (the same file: codes of entries that wait for a group), "sketched" (``sketch.py``: places
    in cells) or "spans" (:class:`JoinedSpans`); empty: the library cannot read them."""

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


class Span(NamedTuple):
    """Consecutive rows of two tensors; every query sees all of these entries."""

    keys: Any
    """(lanes, rows, key_dim), or (1, lanes, rows, key_dim), or :class:`Coded`."""
    values: Any
    """(lanes, rows, value_dim), or like the keys."""
    start: int
    """The first row; 0 if the entries are coded."""
    stop: int
    """The row behind the last one."""

    @property
    def entries(self) -> int:
        """The number of entries."""
        return self.stop - self.start

    def segment(self) -> Segment:
        """Return the span as a segment."""
        if not isinstance(self.keys, Tensor):
            return Segment(self.keys, self.values)
        keys, values = (part.flatten(0, -3)[:, None, self.start : self.stop] for part in (self.keys, self.values))
        return Segment(keys, values)


class JoinedSpans:
    """Several spans as the keys of one segment; :attr:`values` are its values."""

    layout: ClassVar[str] = "spans"

    def __init__(self, spans: Sequence[Span], name: str = "keys") -> None:
        self.spans = tuple(one for span in spans for one in (span.keys.spans if _joined(span) else [span]))
        self._name = name

    @property
    def values(self) -> JoinedSpans:
        """The values of the spans."""
        return JoinedSpans(self.spans, "values")

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """(lanes, 1, entries, dim)."""  # of hundreds of pages, asked for in each step
        lanes, _, dim = getattr(self.spans[0], self._name).shape[-3:]
        return lanes, 1, sum(span.entries for span in self.spans), dim

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
        parts = [getattr(one, self._name).flatten(0, -3)[:, one.start : one.stop] for one in self.spans]
        return torch.cat(parts, 1).to(dtype)


def _joined(span: Span) -> bool:
    return isinstance(span.keys, JoinedSpans)


class FullPages:
    """Full pages as one span, which stays the same object as long as the pages do."""

    def __init__(self) -> None:
        self._pages: list[Tensor] = []  # keys, then values
        self._all: Span | None = None

    def span(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Span | None:
        """Return all rows of these tensors, as of a :class:`Span`, one after the other; None where there are none."""
        pages = [*keys, *values]
        if len(pages) != len(self._pages) or not all(map(is_, pages, self._pages)):
            self._pages, self._all = pages, None
            if pages:
                joined = JoinedSpans([Span(*pair, 0, pair[0].shape[-2]) for pair in zip(keys, values, strict=True)])
                self._all = Span(joined, joined.values, 0, joined.shape[2])
        return self._all


class Destination(NamedTuple):
    """The row to which one entry of each lane is written."""

    keys: Tensor
    """(lanes, rows, key_dim), or (1, lanes, rows, key_dim)"""
    values: Tensor
    """(lanes, rows, value_dim), or like the keys"""
    row: int = 0
    """The row's number, the same for all lanes."""
    slots: Tensor | None = None
    """(lanes, columns) int32, the slot of the entry in each of the first rows; None: slots are not needed, and there is
    nothing else beside keys and values."""
    scores: Tensor | None = None
    """(lanes, columns) float32; None: entries have no scores."""
    extra: Tensor | None = None
    """(lanes, columns) float32, the number of other tokens merged into an entry; None: nothing was merged."""
    newest: Tensor | None = None
    """(lanes, columns) int32, the last slot merged into an entry; None: nothing was merged."""


class StoreShare(NamedTuple):
    """What a store of evicted entries adds to a step."""

    attend: Sequence[Span] = ()
    """Its entries after the step."""
    evict: Destination | None = None
    """:attr:`LayerStep.evict`."""
    seen: Tensor | None = None
    """:attr:`LayerStep.seen`."""


@dataclass(frozen=True, eq=False)
class TextSteps:
    """The steps of a text's next tokens, in each layer that plans them."""

    by_layer: Mapping[int, LayerStep] = field(default_factory=dict)
    """By number of the layer."""


class MovedSteps:
    """Steps that were planned once, and apply again ``rows`` tokens later, or earlier: the entries of a layer that
    evicts none take the rows and slots that many further on, and the last spans end that many rows later."""

    def __init__(self, steps: TextSteps, rows: int = 0) -> None:
        self.planned, self.rows = steps, rows
        self._moved: dict[int, LayerStep] = {}

    def of(self, layer: int) -> LayerStep | None:
        """Return the step in a layer, always the same object; None where it is not planned."""
        if not self.rows:
            return self.planned.by_layer.get(layer)
        if layer not in self._moved and (step := self.planned.by_layer.get(layer)) is not None:
            append, last = step.append, step.attend[-1]
            self._moved[layer] = step._replace(
                append=append._replace(row=append.row + self.rows),
                slot=step.slot + self.rows,
                attend=[*step.attend[:-1], last._replace(stop=last.stop + self.rows)],
            )
        return self._moved.get(layer)


NO_STEPS = MovedSteps(TextSteps())
"""No layer has a planned step."""

Planned = Sequence[tuple[MovedSteps, int]]
"""The steps of each session in a pass, and the place of its first token in the row, in order."""


class Writes:
    """Which steps of a pass have written their entries: an error or an interrupt may come between two of them, or
    behind the call that has run them."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self._numbers)
        """Of the pass, for the library, which notes it in each step."""
        self.steps: set[int] = set()
        """Ids of parts of steps, by tensor operations."""


class LayerStep(NamedTuple):
    """The step of one decoded token of a sequence in one layer: its entry is written, and its query attends; or of
    several tokens (:attr:`tokens`). The native library compares it with its tensors before it writes. Every token has
    new steps, so they are named tuples: these are made in a third of the time of a frozen dataclass."""

    append: Destination
    """Where the new entry is written; the entry in that row is evicted."""
    slot: int | Tensor = 0
    """The slot of the new entry, or of the first one. A tensor without dimensions, on the device, in a pass that is
    captured: :mod:`kvkeep.step.torch` reads it there."""
    ranks: Tensor | None = None
    """(lanes, columns), for the library float32 or int32. The new entry takes the row of lowest rank; rows with slot -1
    come first. None: it takes ``append.row``."""
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
    """The steps of the token's other lanes, in order, if lanes have different numbers of entries; they have no
    others."""
    tokens: int = 1
    """How many tokens of the sequence. All their entries are written, from the row and slot of the first one on, before
    the queries attend; each query then attends to the entries up to its token's."""
    evicts: int = 1
    """How many of these tokens evict an entry, if there is :attr:`evict`: the last ones. The evicted entries are copied
    to rows that follow each other. Of several tokens, nothing beside entries is copied."""
    place: Tensor | None = None
    """(1,) int64, on the device: the row of the new entry, instead of ``append.row``, so that all drafts have the same
    numbers. Only in steps of one token that evict nothing, and not for the library."""
    window: int = 0
    """Of the entries up to its token's, how many a query attends to, the last ones; 0: all of them."""
    first: int = 0
    """The slot of the first entry of :attr:`attend`, if others come before it in the text, and there is a window."""

    @property
    def parts(self) -> Sequence[LayerStep]:
        """This step, and those of the other lanes."""
        return (self, *self.others) if self.others else (self,)

    @property
    def entries(self) -> int:
        """The number of entries that the query attends to, and of empty places between them."""
        total = 0
        for span in self.attend:  # called for each layer of each token
            total += span.stop - span.start
        return total

    def segments(self) -> list[Segment]:
        """Return :attr:`attend` as segments, with what each query sees as their masks."""
        segments, seen = [span.segment() for span in self.attend], self.seen
        if seen is not None:
            seen = seen[:, None, None, : self.entries]
        if self.tokens > 1 or self.window:
            earlier = torch.ones(self.tokens, self.entries, dtype=torch.bool).tril(self.entries - self.tokens)
            if self.window:
                earlier = earlier.triu(self.entries - self.tokens - self.window + 1)
            earlier = earlier.to(self.append.keys.device)[None, None]
            seen = earlier if seen is None else seen & earlier
        if seen is None:
            return segments
        masks = seen.split([span.entries for span in self.attend], -1)
        return [replace(segment, mask=mask) for segment, mask in zip(segments, masks, strict=True)]
