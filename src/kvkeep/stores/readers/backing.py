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
from kvkeep.contracts.part import Site
from kvkeep.contracts.recall import Reader
from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.read_evicted import observe_evicted


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
