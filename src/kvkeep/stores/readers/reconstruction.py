"""The reader of a reconstruction: it records the attention of each entry while a text is read a second time.

Score "max", KVzip (arXiv:2505.23416, section 3): the score of an entry is the maximum attention that it receives from
any query of the repeated text, in any head that shares the entry. A long text is repeated in pieces. The attention of a
piece's queries is then normalised over the first entries of the text, and over the piece's entries from the first and
from the second reading.

Score "max of text", EpiCache (arXiv:2509.17396): the same maximum. The attention is normalised over the whole text.

Score "rms", Attention Matching (arXiv:2602.16284): the score is the root of the mean squared attention over all queries
and heads. The attention is normalised over the whole text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import Piece
from kvkeep.contracts.selector import ReconstructionPieces
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.rehearsal import Rehearsal


class ReconstructionReader(Rehearsal):
    """Attends exactly to all entries of a layer and to the new ones, which are discarded afterwards.

    piece: the slots that are repeated in this pass. pieces: how the text is read, and how entries are scored. stride:
    the distance of queries that are stored for a fit; 0: none are.
    """

    def __init__(self, layer: Layer, pieces: ReconstructionPieces, stride: int = 0) -> None:
        self.sinks, self.kind, self.stride, self.piece = pieces.sinks, pieces.score, stride, (0, layer.length)
        self.scores = torch.zeros(layer.ledger.batch * layer.heads, layer.length, device=layer.device)
        """(lanes, slots) float32."""
        self.scaling = 1.0
        self.queries: list[Tensor] = []
        """Of each pass (lanes, heads * n, key_dim)."""
        self.valid: list[Tensor] = []
        """Of each pass (lanes, heads * n) bool, False for padding."""
        self._counts: Tensor | int = 0  # queries scored, of all heads, (lanes, 1)

    def attended(self, layer: Layer, step: AttentionInputs) -> Tensor:
        past = (segment for _, segment in self._past(layer, step))
        output, lse = attend(step.query, chain(past, [step.arriving()]), step.scaling, origin=layer.origin)
        if self.kind == "rms":
            self._add_squares(layer, step)
        else:
            self._raise_to_max(layer, step, lse)
        if self.stride:
            real = layer.ledger.unpadded(torch.zeros_like(lse), layer.heads) == 0
            self.queries.append(step.query[:, :, :: self.stride].flatten(1, 2).clone())
            self.valid.append(real[:, :, :: self.stride].flatten(1))
            self.scaling = step.scaling
        return output

    def finish(self) -> None:
        """Turn sums into scores, after the last pass."""
        if self.kind == "rms":
            self.scores.div_(self._counts).sqrt_()

    def _past(
        self, layer: Layer, step: AttentionInputs, spans: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[tuple[Piece, Segment]]:
        """Yield all entries, or those of the slots in ``spans``."""
        wide = step.wide(layer.length)
        evicted = layer.evicted.pieces(step.query, layer.resident, layer.length)
        for piece in chain(evicted, layer.resident.pieces()):
            parts = [piece] if spans is None else [piece.between(*span) for span in spans]
            yield from ((part, layer.segment(part, step, wide)) for part in parts if part is not None)

    def _add_squares(self, layer: Layer, step: AttentionInputs) -> None:
        _, lse = attend(step.query, (segment for _, segment in self._past(layer, step)), step.scaling)
        lse = layer.ledger.unpadded(lse, layer.heads)
        self._counts = self._counts + lse.isfinite().sum((1, 2), keepdim=True)[..., 0]
        for piece, segment in self._past(layer, step):
            # exp(2 s - 2 lse) is the square of the weight exp(s - lse); the mean over heads becomes a sum.
            squares = received(step.query, segment, 2 * lse, 2 * step.scaling) * step.query.shape[1]
            self.scores[:, piece.first : piece.first + squares.shape[1]] += squares

    def _raise_to_max(self, layer: Layer, step: AttentionInputs, lse: Tensor) -> None:
        start, stop = self.piece
        if self.kind == "max of text":
            _, lse = attend(step.query, (segment for _, segment in self._past(layer, step)), step.scaling)
        elif start or stop < layer.length:
            compared = (segment for _, segment in self._past(layer, step, [(0, min(self.sinks, start)), self.piece]))
            _, lse = attend(step.query, chain(compared, [step.arriving()]), step.scaling)
        lse = layer.ledger.unpadded(lse, layer.heads)
        for piece, segment in self._past(layer, step, [self.piece]):
            weights = received(step.query, segment, lse, step.scaling, None, "max")
            scores = self.scores[:, piece.first : piece.first + weights.shape[1]]
            torch.maximum(scores, weights, out=scores)
