"""What layers have in common whose entries may stand for several tokens.

An entry that stands for l tokens with values summed to v contributes exp(s) v to the numerator of attention and
l exp(s) to its denominator. That is a plain softmax over s + log l with value v / l: an additive mask, for every
kernel. So what is stored is v / l and, in ``Bank.others``, l - 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment
from kvkeep.stores.banks import Bank
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


class CountedLayer(SelectedLayer):
    """A layer of chosen entries that counts how many tokens each stands for, and weighs it accordingly."""

    def held_segments(self, module: Any, wide: Tensor | None) -> list[Segment]:
        """Return what is resident, a segment for each bank in use, with the logarithm of the counts in its mask. A mask
        of the caller's own decides about a merged entry by the slot that the entry goes by."""
        segments = super().held_segments(module, wide)
        used = [bank for bank in self.banks if bank.used]
        return [_weighted(segment, bank) for segment, bank in zip(segments, used, strict=True)]

    def real(self, length: int) -> Tensor:
        """Return which slots are no padding, (lanes, ``length``) bool, on the CPU."""
        real = torch.ones(self.rows * self.heads, length, dtype=torch.bool)
        if (visible := self.visible) is not None:
            known = visible[:, 0, 0, :length].cpu()
            real[:, : known.shape[1]] = known
        return real

    def whereabouts(self, length: int) -> Tensor:
        """Return what became of every slot: (batch, kv_heads, ``length``) codes, on the CPU."""
        codes = torch.full((self.rows * self.heads, length + 1), Whereabouts.MERGED, dtype=torch.int8)
        codes[:, :length][~self.real(length)] = Whereabouts.DROPPED
        for bank in self.banks:
            slots = bank.slots[:, : bank.used].cpu().long()
            if bank.others is not None:
                slots = slots.masked_fill(bank.others[:, : bank.used].cpu() > 0, length)
            lanes = torch.arange(len(slots)) if bank.lanes is None else bank.lanes.cpu()
            codes[lanes[:, None], slots.masked_fill((slots < 0) | (slots > length), length)] = Whereabouts.RESIDENT
        return codes[:, :length].unflatten(0, (self.rows, self.heads))


def _weighted(segment: Segment, bank: Bank) -> Segment:
    if bank.others is None:
        return segment
    bias = bank.others[:, None, None, : bank.used].log1p().to(segment.value.dtype)
    if segment.mask is None:
        return replace(segment, mask=bias)
    if segment.mask.dtype == torch.bool:
        return replace(segment, mask=torch.where(segment.mask, bias, float("-inf")))
    return replace(segment, mask=segment.mask + bias)
