"""``segments``: what leaves is kept whole, and each query reads the few segments that promise it most (LongCache)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.policies.fates.base import Fate
from kvkeep.policies.fates.grouped import GroupedFate
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.groups import Groups
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


@dataclass(frozen=True)
class Segmented(Fate):
    """Nothing is removed: memory grows with the text, and only the work of a step is bounded. Each KV head reads its
    ``top`` segments of 32 entries, those with the highest bound on a score: the sum over channels of max(q min, q max)
    over the segment's keys, the largest of the step's queries."""

    top: int = 8

    label: ClassVar[str] = "kept in segments"
    recall: ClassVar[str] = "the most promising segments"
    exactness: ClassVar[Exactness] = Exactness.REVERSIBLE

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"At least one segment is read, not {self.top}.")

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return a store without an end."""
        return _Segmented(self.top, request, meter)


class _Segmented(GroupedFate):
    def __init__(self, top: int, request: Request, meter: Meter) -> None:
        super().__init__(Whereabouts.CHECKPOINTED, {layer.index: None for layer in request.geometry.full_layers})
        self.top, self.meter = top, meter

    def encode(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        return [keys, values, keys.amin(2), keys.amax(2)]

    def read(self, layer: SelectedLayer, query: Tensor, groups: Groups) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        (keys, values, low, high), slots = groups.by_lane()
        if query.shape[-1] == low.shape[-1] and groups.held > self.top:
            # max(q min, q max) is q max for positive q and q min for negative.
            asked = query.flatten(1, 2)
            bound = asked.clamp(min=0) @ high.transpose(1, 2) + asked.clamp(max=0) @ low.transpose(1, 2)
            chosen = bound.amax(1).topk(self.top, dim=1, sorted=False).indices
            lanes = torch.arange(len(chosen), device=chosen.device)[:, None]
            keys, values, slots = keys[lanes, chosen], values[lanes, chosen], slots[lanes, chosen]
        with self.meter.holding(keys, values):
            yield slots.flatten(1), groups.holes, keys.flatten(1, 2)[:, None], values.flatten(1, 2)[:, None]
