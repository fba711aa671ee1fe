"""The backing of one layer: a checkpoint that holds every entry, resident or not, in the order of the text.

The backing has every entry before it is evicted. An exact pass therefore attends to the backing and to the new entries,
so that no entry counts twice. The attention of resident entries only updates their scores.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EntryState, Piece
from kvkeep.contracts.recall import Reader
from kvkeep.contracts.site import Site
from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.read_evicted import observe_evicted
from kvkeep.stores.slots import compact


class Backed(Reader):
    """A reader of a layer whose backing holds every entry."""

    def __init__(self, site: Site) -> None:
        assert site.checkpoint is not None
        self.checkpoint, self.index = site.checkpoint, site.layer.index

    @property
    def first(self) -> int:
        """The first slot that the backing still has; earlier slots are lost."""
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

        return attend(step.query, segments(), step.scaling, origin=layer.origin)

    def attend_exactly(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Attend to all entries, let the selector and the store learn the attention, and settle the new entries."""
        output, lse = self.everything(layer, step)
        attended_exactly(layer, step, output, lse)
        if step.last:
            layer.finish()
        return output

    def picked(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (lanes, n, dim) of ``slots`` (lanes, n); zeros where a slot is -1."""
        there = slots >= 0
        lane, _ = there.nonzero(as_tuple=True)
        picked = self.checkpoint.pick(self.index, lane, slots[there])
        if len(lane) == slots.numel():
            return picked[0].view(*slots.shape, -1), picked[1].view(*slots.shape, -1)
        filled = tuple(part.new_zeros(*slots.shape, part.shape[-1]) for part in picked)
        for rows, part in zip(filled, picked, strict=True):
            rows[there] = part
        return filled[0], filled[1]

    def away(self, layer: Layer) -> Tensor:
        """Return which slots can come back: in the backing, not resident, not padding; (lanes, slots) bool."""
        flags = ~layer.resident.resident_slots()
        if (visible := layer.ledger.visible_by(layer.heads)) is not None:
            flags &= visible[:, 0, 0, : layer.length]
        flags[:, : self.first] = False
        return flags

    def bring(self, layer: Layer, slots: Tensor) -> None:
        """Make ``slots`` (lanes, n) resident, -1 for none; the store forgets them."""
        if slots.shape[1]:
            layer.evicted.forget(slots)
            layer.resident.swap_in(slots, *self.picked(slots))

    def recall(self, layer: Layer, slots: Tensor, limit: int) -> int:
        if not layer.length or not len(slots):
            return 0
        wanted = self.away(layer)[:, slots]
        wanted &= wanted.cumsum(1) <= min(limit, layer.resident.least_columns)
        chosen = compact(wanted)
        if chosen.shape[1]:
            self.bring(layer, slots[chosen.clamp(min=0)].masked_fill(chosen < 0, -1))
        return int(wanted.sum())


def attended_exactly(layer: Layer, step: AttentionInputs, output: Tensor, lse: Tensor) -> None:
    """Let the selector and the store learn the attention of a step over all entries: resident, evicted and new."""
    resident, store = layer.resident, layer.evicted
    wide = step.wide(layer.length)
    if step.brings_entries and store.neighbours is not None:
        store.neighbours.begin(resident)
    resident_segments = [layer.segment(piece, step, wide) for piece in resident.pieces()] if resident.observes else []
    resident.observe(step, lse, resident_segments, layer.pending, layer.length)
    if store.listens:
        pieces = store.pieces(step.query, resident, layer.length)
        observe_evicted(layer, step, lse, [layer.segment(piece, step, wide) for piece in pieces])
    if store.neighbours is not None:
        store.neighbours.attended(step, output, resident)
