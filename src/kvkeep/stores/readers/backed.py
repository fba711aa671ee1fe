"""Readers of a layer whose checkpoint holds every entry, resident or not, in the order of the text.

The checkpoint has every entry before it is evicted. An exact pass therefore attends to the checkpoint, page by page,
and to the new entries, so that no entry counts twice. The attention of resident entries only updates their scores.

:class:`ReadCheckpoint` makes every pass exact. Sums in floating point depend on their order. As the checkpoint has the
order of the text, attention gives the bits of the unbounded cache, whatever the selector keeps resident.

:class:`DraftAndVerify` does the same, except in a draft pass: then it attends to the resident entries, the store of
evicted ones, and the drafted ones. These are in the *tail*: columns behind the resident ones, part of the budget. An
entry may become resident again when attention returns to it: after a wrong draft, the resident entries are chosen anew
from all entries, by the attention of the last tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EntryState, Piece
from kvkeep.contracts.part import Site
from kvkeep.contracts.recall import Reader
from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.memory.meter import nbytes
from kvkeep.step.plan import Destination, LayerStep, Span
from kvkeep.stores.layer import Layer, observe_evicted
from kvkeep.stores.readers.draft_passes import DraftPasses
from kvkeep.stores.resident.eviction import reselect

VOTERS = 32
"""The maximum number of queries that are kept to choose the resident entries anew."""


class Backed(Reader):
    """A reader of a layer whose checkpoint holds every entry."""

    def __init__(self, site: Site) -> None:
        assert site.checkpoint is not None
        self.checkpoint, self.index = site.checkpoint, site.layer.index

    @property
    def first(self) -> int:
        """The first slot that the checkpoint still has; earlier slots are lost."""
        return self.checkpoint.first(self.index)

    def settling(self, layer: Layer, keys: Tensor, values: Tensor, mapped: bool = False) -> None:
        if mapped:
            self.checkpoint.adopt(self.index, keys, values)
        else:
            self.checkpoint.append(self.index, keys, values)

    def past(self, layer: Layer) -> Iterator[Piece]:
        yield from self.checkpoint.pieces(self.index, layer.length)

    def states(self, layer: Layer, evicted: Tensor) -> Tensor:
        """Return the states; entries that the store dropped are checkpointed, except lost ones."""
        evicted = evicted.masked_fill(evicted == EntryState.DROPPED, EntryState.CHECKPOINTED)
        lost = evicted[..., : self.first]
        lost.masked_fill_(lost == EntryState.CHECKPOINTED, EntryState.DROPPED)
        return evicted

    def truncate(self, layer: Layer, length: int) -> None:
        self.checkpoint.truncate(self.index, min(length, layer.length))

    def check(self, extent: Extent) -> None:
        if self.checkpoint.length(self.index) != extent.slots:
            raise ShapeError("entries are missing in the checkpoint")

    def segments(
        self, layer: Layer, step: AttentionInputs, keep: Tensor | None = None, wide: Tensor | None = None
    ) -> Iterator[Segment]:
        """Yield all entries, a piece at a time. keep: (lanes, slots) bool, the wanted entries."""
        if layer.length:
            for piece in self.checkpoint.pieces(self.index, layer.length, lazy=keep is None):
                yield layer.segment(piece, step, wide, keep)

    def everything(self, layer: Layer, step: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return attention over all entries, pending ones included, and its log-sum-exp."""

        def segments() -> Iterator[Segment]:
            yield from self.segments(layer, step, wide=step.wide(layer.length))
            if layer.pending is not None:
                yield step.arriving()

        return attend(step.query, segments(), step.scaling, step.sinks, layer.origin)

    def attend_exactly(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Attend to all entries, let the selector and the store learn the attention, and settle the new entries."""
        output, lse = self.everything(layer, step)
        self.note_queries(layer, step, output, lse)
        attended_exactly(layer, step, output, lse)
        if step.last:
            layer.finish()
        return output

    def note_queries(self, layer: Layer, step: AttentionInputs, output: Tensor, lse: Tensor) -> None:
        """Called with the attention over all entries, ``output`` and its log-sum-exp, before a step's entries are
        settled."""


def attended_exactly(layer: Layer, step: AttentionInputs, output: Tensor, lse: Tensor) -> None:
    """Let the selector and the store learn the attention of a step over all entries: resident, evicted and new."""
    resident, store = layer.resident, layer.evicted
    wide = step.wide(layer.length)
    if step.brings_entries:
        store.begin(resident)
    resident_segments = [layer.segment(piece, step, wide) for piece in resident.pieces()] if resident.observes else []
    resident.observe(step, lse, resident_segments, layer.pending, layer.length)
    if store.listens:
        pieces = store.pieces(step.query, resident, layer.length)
        observe_evicted(layer, step, lse, [layer.segment(piece, step, wide) for piece in pieces])
    store.attended(step, output, resident)


class ReadCheckpoint(Backed):
    """Attends to the checkpoint and to the new entries. After the first eviction, the attention of resident entries
    only updates their scores."""

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        if layer.attends_settled(step):
            layer.settle()
        return self.attend_exactly(layer, step)

    def segments(
        self, layer: Layer, step: AttentionInputs, keep: Tensor | None = None, wide: Tensor | None = None
    ) -> Iterator[Segment]:
        """Yield all entries: the resident ones before the first eviction, else those of the checkpoint. A checkpoint of
        limited capacity has lost its oldest entries; lost entries that are resident are yielded, too."""
        if (piece := layer.resident.whole_text()) is not None:
            yield layer.segment(piece, step, wide)
            return
        if self.first:
            lost = (torch.arange(layer.length, device=layer.device) < self.first).expand(len(step.query), -1)
            for piece in layer.resident.pieces():
                yield layer.segment(piece, step, wide, lost)
        yield from super().segments(layer, step, keep, wide)


@dataclass(frozen=True)
class _Voters:
    """The last queries of a step, and their attention."""

    step: AttentionInputs
    output: Tensor
    """(lanes, heads, queries, value_dim)"""
    lse: Tensor
    """(lanes, heads, queries)"""
    first: int
    """The slot of the first query."""

    def of(self, start: int, stop: int) -> _Voters:
        """Return the queries with the numbers from ``start`` to ``stop``."""
        query, output, lse = (part[:, :, start:stop] for part in (self.step.query, self.output, self.lse))
        return _Voters(replace(self.step, query=query), output, lse, self.first + start)


class DraftAndVerify(ReadCheckpoint):
    """Attends to all entries, and to the resident and the drafted ones while ``passes`` are active."""

    def __init__(self, site: Site, passes: DraftPasses) -> None:
        super().__init__(site)
        self.passes = passes
        self.waiting = 0  # entries in the tail
        self._voters: _Voters | None = None
        self._seen: list[Tensor] = []  # of each bank, which rows have an entry that drafts see, if steps are uniform

    def chooses(self, layer: Layer) -> bool:
        """Return whether the resident entries can be chosen anew from all entries: the selector uses only attention,
        only the checkpoint has evicted entries, and reading it a second time is cheap."""
        store, selector = layer.evicted, layer.resident.selector
        only_backed = not (store.keeps or store.makes_room)
        return only_backed and self.checkpoint.in_place and selector.observation_window != 0 and not selector.needs_kv

    # -- a forward pass -----------------------------------------------------------------------------

    def arrive(self, layer: Layer, keys: Tensor, values: Tensor) -> None:
        if not self.passes.active:
            layer.resident.arrive(keys, values)

    def plan(self, layer: Layer, count: int = 1) -> LayerStep | None:
        """Return the step of a draft, if it attends to resident entries alone; if steps are not uniform, to one bank
        without gaps."""
        store, banks = layer.evicted, layer.resident.banks
        bank = banks.banks[0]
        if count > 1 or not self.passes.active or store.keeps or store.makes_room:
            return None
        if self._seen:
            return self._plan_uniformly(layer)
        if banks.seen_by_all != bank.used:
            return None
        row = bank.used + self.waiting
        attended = [Span(bank.keys, bank.values, 0, row + 1)]
        return LayerStep(Destination(bank.keys, bank.values, row), layer.arrived, attend=attended)

    def _plan_uniformly(self, layer: Layer) -> LayerStep | None:
        """Return the step of a draft, with the numbers that every other draft has: its row is a tensor, and a
        mask on the device says to which rows it attends."""
        parts, tail = list[LayerStep](), torch.arange(self.passes.tail, device=layer.device)
        place, slot = self.passes.place(), self.passes.ledger.number(layer.arrived)
        for bank, seen in zip(layer.resident.banks, self._seen, strict=True):
            if not bank.columns or bank.extra is not None:
                return None
            seen[:, bank.columns :] = tail <= place
            row = place + bank.columns
            for first, lanes, keys, values, *_ in bank.runs(by_lane=False):
                append, span = Destination(keys, values), Span(keys, values, 0, keys.shape[-2])
                parts.append(LayerStep(append, slot, attend=[span], seen=seen[lanes], first_lane=first, place=row))
        one, *others = sorted(parts, key=lambda part: part.first_lane)
        return one._replace(others=others) if others else one

    def begin(self, layer: Layer, choose: bool) -> None:
        """Begin drafts. choose: the resident entries are first chosen anew, where that is possible."""
        if choose:
            self.choose(layer)
        if not self.passes.uniform:
            return
        banks = layer.resident.banks
        shapes = [(len(bank.slots), bank.keys.shape[1]) for bank in banks]
        if [one.shape for one in self._seen] != shapes:
            self._seen = [torch.empty(shape, dtype=torch.bool, device=layer.device) for shape in shapes]
        for bank, seen in zip(banks, self._seen, strict=True):
            seen[:, : bank.columns] = bank.slots >= 0

    def layout(self, layer: Layer) -> Sequence[Any] | None:
        """Return the layout of drafts, once the budget is full. It has no number, because exact passes and crops change
        entries in place. A selector that divides the budget makes new tensors in each exact pass, so a graph would
        serve for a few drafts only."""
        resident, banks = layer.resident, layer.resident.banks
        grows = any(not bank.columns or bank.columns < bank.budget for bank in banks)
        if layer.pending is not None or not layer.evicted.idle or resident.selector.divides or grows:
            return None
        if not self.passes.uniform:  # the row of a draft is a number
            return None
        return [one for bank, seen in zip(banks, self._seen, strict=True) for one in (bank.keys, bank.values, seen)]

    def commit(self, layer: Layer) -> None:
        if self.passes.active:
            self.waiting += 1
        else:
            super().commit(layer)

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        return self._draft(layer, step) if self.passes.active else super().attend(layer, step)

    def _draft(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Attend, with one query a row, over the resident entries, the store, and the tail."""
        self._put_in_tail(layer)
        banks = [bank for bank in layer.resident.banks if bank.columns and bank.used + self.waiting]
        segments = [layer.segment(bank.piece(self.waiting), step, None) for bank in banks]
        evicted = layer.evicted.pieces(step.query, layer.resident, layer.length)
        segments += [layer.segment(piece, step, None) for piece in evicted]
        return attend(step.query, segments, step.scaling, step.sinks)[0]

    def _put_in_tail(self, layer: Layer) -> None:
        """Put the pending entries into the tail of the banks, behind those that wait there."""
        if layer.pending is None:
            return
        (keys, values), layer.pending = layer.pending, None
        for bank in layer.resident.banks:
            span = slice(bank.used + self.waiting, bank.used + self.waiting + keys.shape[1])
            bank.keys[:, span], bank.values[:, span] = bank.of(keys), bank.of(values)
        self.waiting += keys.shape[1]

    def note_queries(self, layer: Layer, step: AttentionInputs, output: Tensor, lse: Tensor) -> None:
        if not self.chooses(layer):
            return
        last = min(step.queries, VOTERS)  # of which some may be taken back
        query, output, lse = (part[:, :, -last:].clone() for part in (step.query, output, lse))
        none, stop = query.new_empty(0), layer.length if layer.pending is None else layer.length + step.new
        self._voters = _Voters(replace(step, query=query, key=none, value=none, mask=None), output, lse, stop - last)

    def choose(self, layer: Layer) -> None:
        """Choose the resident entries anew from all entries, if these exceed the budget."""
        voters, self._voters = self._voters, None
        if voters is None or layer.resident.banks.least_columns >= layer.length:
            return
        window = layer.resident.selector.observation_window
        voters = voters if window is None else voters.of(max(0, voters.step.queries - window), voters.step.queries)
        step, lse = voters.step, voters.lse
        if (visible := layer.ledger.visible_by(layer.heads)) is not None:
            # Queries of padding also attend; their attention must not count.
            span = slice(voters.first, voters.first + step.queries)
            lse = lse.masked_fill(~visible[:, :, 0, span], float("inf"))
        parts = []
        asking = torch.arange(voters.first, voters.first + step.queries, device=lse.device)
        for piece in self.checkpoint.pieces(layer.index, layer.length):
            segment = layer.segment(piece._replace(slots=None), step, None)
            stop = piece.first + piece.keys.shape[2]
            mask = None
            if stop > voters.first:
                mask = (torch.arange(piece.first, stop, device=lse.device) <= asking[:, None])[None, None]
            parts.append(
                received(
                    step.query, replace(segment, mask=mask), lse, step.scaling, None, layer.resident.selector.reduce
                )
            )
        reselect(
            layer.resident,
            torch.cat(parts, 1),
            step.queries,
            lambda lane, slot: self.checkpoint.pick(layer.index, lane, slot),
        )

    def forget_drafts(self, layer: Layer, length: int) -> None:
        """Forget the drafts from slot ``length`` on."""
        layer.pending = None
        self.truncate(layer, length)

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, layer: Layer, length: int) -> None:
        self.waiting = max(0, min(self.waiting, length - layer.length))
        if (voters := self._voters) is not None and length < layer.length:
            self._voters = voters.of(0, length - voters.first) if length > voters.first else None
        super().truncate(layer, length)

    def select(self, layer: Layer, lanes: Tensor) -> None:
        self._voters = None

    @property
    def bookkeeping_bytes(self) -> int:
        voters = self._voters
        queries = () if voters is None else (voters.step.query, voters.output, voters.lse)
        return nbytes(*queries, *self._seen)
