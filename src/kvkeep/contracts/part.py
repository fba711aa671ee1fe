"""The parts of a layer: their base class, the layer that they belong to, and the bytes that they will hold."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.extent import Extent
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter


@dataclass(frozen=True)
class Site:
    """One full layer of one cache: the context that a part is made for."""

    layer: LayerGeometry
    geometry: ModelGeometry
    model: Any
    entries: int
    """The layer's budget, in entries of each KV head, without the pinned ones."""
    budgets: Sequence[int]
    """Resident entries of each KV head, pinned ones included; one number: the same for all heads."""
    readers: int
    """Modules that read its entries."""
    first: bool
    """It is the first full layer of the cache. This layer counts and moves the data that all layers share."""
    ledger: Ledger
    meter: Meter
    device: torch.device
    checkpoint: Checkpoint | None
    pinned: int = 0
    """The number of first tokens of each row whose entries stay resident as they are, beside :attr:`entries`."""


@dataclass(frozen=True)
class PredictedBytes:
    """Bytes that a part of one layer will hold, for all its KV heads of one row."""

    compressed: int = 0
    """Bytes of entries in a smaller form."""
    bookkeeping: int = 0
    """Bytes of slots, scores, counts and the like."""
    workspace: int = 0
    """Bytes of temporary tensors."""
    entries: int = 0
    """The number of entries of one KV head that attention can still read there."""
    shrunk: int = 0
    """The bytes by which the part has become smaller."""


class Part(ABC):
    """A part of a layer. It holds state of one layer of one cache."""

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots, scores, counts and other data beside entries."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        return {}

    def check(self, extent: Extent) -> None:
        """Raise ShapeError where the state read from a file does not fit a layer of ``extent``. Called after the whole
        cache is restored."""
