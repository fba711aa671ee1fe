"""The reader of a selector with a checkpoint: a step attends to every entry, in the order of the text.

Sums in floating point depend on their order. The checkpoint holds all entries in the order of the text, so attention
that reads them there gives the bits of the unbounded cache, whatever the selector keeps resident.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.backing import Backed


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
