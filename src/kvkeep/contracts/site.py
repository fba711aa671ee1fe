"""Where a part is put to work, and the bytes that it will hold there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter


@dataclass(frozen=True)
class Site:
    """Where a part is put to work: one full layer of one cache."""

    layer: LayerGeometry
    geometry: ModelGeometry
    model: Any
    entries: int
    """The layer's budget, in entries of each KV head."""
    budgets: Sequence[int]
    """What of it is resident, of each KV head; one number: of each of them."""
    in_order: bool
    """Entries are evicted in the order of the text, in all heads alike."""
    page: int
    """Rows rebuilt at a time."""
    readers: int
    """Modules that read its entries."""
    first: bool
    """It is the first full layer of the cache, which accounts for and moves what all of them share."""
    ledger: Ledger
    meter: Meter
    device: torch.device
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class PredictedBytes:
    """Bytes that a part of one layer will hold, for all its KV heads of one row."""

    compressed: int = 0
    """Of entries in a smaller form."""
    bookkeeping: int = 0
    """Of slots, scores, counts and the like."""
    workspace: int = 0
    """For a moment."""
    entries: int = 0
    """Not bytes: entries of one KV head that attention can still read there."""
    shrunk: int = 0
    """By how many bytes it is less than it was before."""
