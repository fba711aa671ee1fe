"""Decodes evicted tokens again from their ids, over the resident entries (llama.cpp pull request 21097).

After a pass, the model reads the tokens whose entries were evicted in it again, at their positions. In every layer they
attend to the resident entries of the preceding text and to each other. Each KV head restores the entries that it
evicted, in place of those that rank lowest. The result is lossy, because the first pass attended to all of the
preceding text. Errors accumulate, because later entries are rebuilt over rebuilt ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.hook import PassHook
from kvkeep.errors import UsageError
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.models.binding import bind
from kvkeep.stores.layer import Layer
from kvkeep.stores.slots import compact
from kvkeep_lab.published.by_hand import halves


class Redecoder(PassHook):
    """Decodes at most ``limit`` tokens per row again after a pass."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._before: list[Tensor] = []  # the resident slots before the pass, by layer

    def before(self, cache: Any, given: dict[str, Any]) -> None:
        """Record the resident slots. Raises UsageError for input that cannot be decoded again."""
        embedded, mask = given.get("input_ids") is None, given.get("attention_mask")
        if embedded or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            came = "embeddings" if embedded else "a mask of the caller's own"
            raise UsageError(
                f"'{cache.method.name}' decodes tokens again from their ids with a causal mask, and this input "
                f"came with {came}; use 'fetch-on-miss'."
            )
        cache.stream.roll_back()
        self._before = [layer.resident.resident_slots() for layer in cache.layers]

    @outside_inference_mode
    def after(self, cache: Any) -> None:
        """Decode the tokens again that the pass evicted."""
        before, self._before = self._before, []
        layers, ledger, adapter = cache.layers, cache.ledger, bind(cache.model)
        if not layers[0].length:
            return
        left = [_left(layer, resident) for layer, resident in zip(layers, before, strict=True)]
        slots = self._chosen(left, ledger.batch)
        if not slots.shape[1]:
            return
        ids, positions = (
            rows.view().squeeze(-1).gather(1, slots.clamp(min=0)) for rows in (ledger.ids, ledger.positions)
        )
        hidden = adapter.embed(ids, positions)
        for layer, evicted in zip(layers, left, strict=True):
            again = _Again(layer, slots, evicted)
            with cache.meter.holding(hidden, again.past):
                hidden = adapter.advance(layer.index, hidden, positions, again)
            again.settle(self.limit)

    def _chosen(self, left: list[Tensor], rows: int) -> Tensor:
        """Return the slots of each row that the most KV heads of all layers evicted; older slots win ties. They are in
        the order of the text, (rows, n) int64, -1 for none."""
        votes = sum(evicted.unflatten(0, (rows, -1)).sum(1) for evicted in left)
        assert isinstance(votes, Tensor)
        length = votes.shape[1]
        order = votes * length - torch.arange(length, device=votes.device)
        best = order.topk(min(self.limit, length), dim=1).indices
        return compact(torch.zeros_like(votes, dtype=torch.bool).scatter_(1, best, True) & (votes > 0))


def _left(layer: Layer, before: Tensor) -> Tensor:
    """Return a mask of the slots that the pass evicted, including slots that arrived in it: (lanes, slots) bool."""
    resident = layer.resident.resident_slots()
    there = torch.nn.functional.pad(before, (0, resident.shape[1] - before.shape[1]), value=True)
    if not len(before):  # before the first pass
        there = torch.ones_like(resident)
    if (visible := layer.ledger.visible_by(layer.heads)) is not None:
        there = there & visible[:, 0, 0]
    return there & ~resident


class _Again:
    """The cache of one layer while the tokens at ``slots`` (rows, n) are decoded again. It computes the layer's
    attention. ``left``: mask of the slots that each lane restores, (lanes, slots) bool."""

    def __init__(self, layer: Layer, slots: Tensor, left: Tensor) -> None:
        self.layer, self.left = layer, left
        self.slots = slots.repeat_interleave(layer.heads, 0)  # (lanes, n)
        asking = self.slots[:, None, :, None]
        self.past = torch.arange(layer.length, device=slots.device) <= asking  # (lanes, 1, n, length)
        if (visible := layer.ledger.visible_by(layer.heads)) is not None:
            self.past = self.past & visible
        # A lane's tokens attend to each other unless they are resident in it. Padding attends to itself, so that no
        # row of the mask is empty.
        there = (self.slots >= 0) & ~layer.resident.resident_slots().gather(1, self.slots.clamp(min=0))
        self.mutual = (self.slots[:, None, None] <= asking) & there[:, None, None]
        self.mutual |= torch.eye(slots.shape[1], dtype=torch.bool, device=slots.device) & (asking < 0)
        self.keys = self.values = slots.new_empty(0)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys.flatten(0, 1), values.flatten(0, 1)
        return keys, values

    def attends(self, layer_idx: int) -> bool:
        return True

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        step = AttentionInputs.of(module, query, key, value, None, scaling, self.layer.heads, True, True)
        segments = [self.layer.segment(piece, step, self.past) for piece in self.layer.resident.pieces()]
        return step.unfolded(
            attend(step.query, [*segments, Segment(step.key, step.value, self.mutual)], scaling, step.sinks)[0]
        )

    def settle(self, limit: int) -> None:
        """Restore the new entries to the lanes that evicted them, up to the available space."""
        wanted = self.left.gather(1, self.slots.clamp(min=0)) & (self.slots >= 0)
        wanted &= wanted.cumsum(1) <= halves(self.layer.resident, limit)
        number = compact(wanted)
        if not number.shape[1]:
            return
        index = number.clamp(min=0)
        keys, values = (
            part.gather(1, index[..., None].expand(-1, -1, part.shape[2])) for part in (self.keys, self.values)
        )
        self.layer.resident.swap_in(self.slots.gather(1, index).masked_fill(number < 0, -1), keys, values)
