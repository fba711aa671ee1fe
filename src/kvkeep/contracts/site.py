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
    """Where a part is put to work: one full layer of one cache.

    entries: the layer's budget. budgets: what of it is resident, of each KV head; one number: of each of them.
    in_order: entries leave in the order of the text, in all heads alike. first: it is the first full layer of the
    cache, which accounts for and moves what all of them share. readers: modules that read its entries.
    """

    layer: LayerGeometry
    geometry: ModelGeometry
    model: Any
    entries: int
    budgets: Sequence[int]
    in_order: bool
    page: int
    readers: int
    first: bool
    ledger: Ledger
    meter: Meter
    device: torch.device
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class PredictedBytes:
    """Bytes that a part of one layer will hold, for all its KV heads of one row; ``workspace``: for a moment;
    ``shrunk``: by how much less it is than it was before. entries: of one KV head that attention can still read
    there."""

    compressed: int = 0
    bookkeeping: int = 0
    workspace: int = 0
    entries: int = 0
    shrunk: int = 0
