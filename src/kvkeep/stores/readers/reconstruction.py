"""The reader of a reconstruction: it records the attention of each entry while a text is read a second time.

KVzip (arXiv:2505.23416, section 3): the score of an entry is the maximum attention that it receives from any query of
the repeated text, in any head that shares the entry. A long text is repeated in pieces. The attention of a piece's
queries is then normalised over the first entries of the text, and over the piece's entries from the first and from the
second reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import Piece
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.rehearsal import Rehearsal


class ReconstructionReader(Rehearsal):
    """Attends exactly to all entries of a layer and to the new ones, which are discarded afterwards.

    piece: the slots that are repeated in this pass. sinks: the number of first entries in the normalisation of a later
    piece.
    """

    def __init__(self, layer: Layer, sinks: int) -> None:
        self.sinks, self.piece = sinks, (0, layer.length)
        self.scores = torch.zeros(layer.ledger.batch * layer.heads, layer.length, device=layer.device)
        """(lanes, slots) float32, the largest weight that each entry received."""

    def attended(self, layer: Layer, step: AttentionInputs) -> Tensor:
        past = (segment for _, segment in self._past(layer, step))
        output, lse = attend(step.query, chain(past, [step.arriving()]), step.scaling, origin=layer.origin)
        self._score(layer, step, lse)
        return output

    def _past(self, layer: Layer, step: AttentionInputs, keep: Tensor | None = None) -> Iterator[tuple[Piece, Segment]]:
        """Yield all entries, or those marked in ``keep`` (1, slots) bool."""
        wide = step.wide(layer.length)
        evicted = layer.evicted.pieces(step.query, layer.resident, layer.length)
        for piece in chain(evicted, layer.resident.pieces()):
            yield piece, layer.segment(piece, step, wide, keep)

    def _score(self, layer: Layer, step: AttentionInputs, lse: Tensor) -> None:
        (start, stop), keep = self.piece, None
        if start or stop < layer.length:
            keep = torch.zeros(1, layer.length, dtype=torch.bool, device=layer.device)
            keep[:, : min(self.sinks, start)] = keep[:, start:stop] = True
            compared = (segment for _, segment in self._past(layer, step, keep))
            _, lse = attend(step.query, chain(compared, [step.arriving()]), step.scaling)
        lse = layer.ledger.unpadded(lse, layer.heads)
        for piece, segment in self._past(layer, step, keep):
            low, high = max(piece.first, start), min(piece.first + piece.keys.shape[2], stop)
            if low < high:
                weights = received(step.query, segment, lse, step.scaling, None, "max")
                scores = self.scores[:, low:high]
                torch.maximum(scores, weights[:, low - piece.first : high - piece.first], out=scores)
