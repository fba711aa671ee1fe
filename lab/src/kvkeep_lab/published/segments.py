"""``segments``: evicted entries are kept as they are, and each query reads the few segments with the highest bounds
(Quest)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, Piece
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.meter import Meter
from kvkeep.stores.evicted.groups import GROUP, Codec, NewestGroups, group_holds


@dataclass(frozen=True)
class Segments(Fate):
    """Every entry is kept: memory grows with the text, and only the work of a step is bounded. Each KV head reads the
    ``top`` segments of 32 entries with the highest bound on a score. The bound is the sum over channels of max(q min, q
    max), with min and max over the segment's keys; a segment has its maximum over the step's queries."""

    top: int = 8
    """Segments that a KV head reads in a step."""

    label: ClassVar[str] = "kept in segments"
    source: ClassVar[str] = "Quest, arXiv:2406.10774"
    returns: ClassVar[str] = "the highest-scoring segments"
    exactness: ClassVar[Exactness] = Exactness.REVERSIBLE

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"At least one segment is read, not {self.top}.")

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return NewestGroups(None, Promising(self.top, site.meter))

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the bytes of all groups, with the minimum and maximum of each key channel."""
        b = geometry.dtype_bytes
        size = GROUP * (layer.key_dim + layer.value_dim) * b + 2 * layer.key_dim * b
        groups = group_holds(layer, geometry, None, left, size, 0)
        read = min(self.top, sum(left) // GROUP) * GROUP * layer.entry_elements * b
        return PredictedBytes(groups.compressed, groups.bookkeeping, read, groups.entries)


@dataclass(frozen=True)
class Promising(Codec):
    """Entries as they are, beside the minimum and maximum of every key channel."""

    kept: ClassVar[EntryState] = EntryState.CHECKPOINTED

    top: int
    meter: Meter

    def encode(self, keys: Tensor, values: Tensor, slots: Tensor) -> list[Tensor]:
        return [keys, values, keys.amin(1), keys.amax(1)]

    def read(self, query: Tensor, parts: list[Tensor], slots: Tensor, gaps: bool) -> Iterator[Piece]:
        keys, values, low, high = parts
        if query.shape[-1] == low.shape[-1] and slots.shape[1] > self.top:
            # max(q min, q max) is q max for positive q and q min for negative.
            queries = query.flatten(1, 2)
            bound = queries.clamp(min=0) @ high.transpose(1, 2) + queries.clamp(max=0) @ low.transpose(1, 2)
            chosen = bound.amax(1).topk(self.top, dim=1, sorted=False).indices
            lanes = torch.arange(len(chosen), device=chosen.device)[:, None]
            keys, values, slots = keys[lanes, chosen], values[lanes, chosen], slots[lanes, chosen]
        with self.meter.holding(keys, values):
            yield Piece(keys.flatten(1, 2)[:, None], values.flatten(1, 2)[:, None], slots.flatten(1), gaps=gaps)
