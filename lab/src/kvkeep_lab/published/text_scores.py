"""Scores of a second reading whose attention is normalised over the whole text."""

from __future__ import annotations

from torch import Tensor

from kvkeep.attention import attend, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.hook import ReadingHook
from kvkeep.reconstruction import ReconstructionReader
from kvkeep.stores.layer import Layer


class LargestOfText(ReconstructionReader):
    """The largest weight of any query and head, as of the base class (EpiCache, arXiv:2509.17396)."""

    def score(self, layer: Layer, step: AttentionInputs, lse: Tensor) -> None:
        super().score(layer, step, self.of_text(layer, step))

    def of_text(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Return the log-sum-exp over the text, without the repetition."""
        past = (segment for _, segment in self.past_segments(layer, step))
        return attend(step.query, past, step.scaling, step.sinks)[1]


class RootMeanSquare(LargestOfText):
    """The root of the mean squared weight of all queries and heads (Attention Matching, arXiv:2602.16284)."""

    def __init__(self, layer: Layer, sinks: int, hook: ReadingHook | None = None) -> None:
        super().__init__(layer, sinks, hook)
        self._counts: Tensor | int = 0  # queries scored, of all heads, (lanes, 1)

    def score(self, layer: Layer, step: AttentionInputs, lse: Tensor) -> None:
        lse = layer.ledger.unpadded(self.of_text(layer, step), layer.heads)
        self._counts = self._counts + lse.isfinite().sum((1, 2), keepdim=True)[..., 0]
        for piece, segment in self.past_segments(layer, step):
            # exp(2 s - 2 lse) is the square of the weight exp(s - lse); the mean over heads becomes a sum.
            squares = received(step.query, segment, 2 * lse, 2 * step.scaling) * step.query.shape[1]
            self.scores[:, piece.first : piece.first + squares.shape[1]] += squares

    def finish(self) -> None:
        """Turn sums into scores."""
        self.scores.div_(self._counts).sqrt_()
