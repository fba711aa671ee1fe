"""What a cache was asked for, and what a method made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.budget import MIN_CHUNK, Budget
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.stores import parts
from kvkeep.stores.checkpoints import Checkpoint, CheckpointSpec
from kvkeep.stores.drafting import Round
from kvkeep.stores.incache import CachePositions


class Exactness(StrEnum):
    """What a method promises about its output."""

    EXACT = "exact"  # token for token the unbounded cache's
    REVERSIBLE = "reversible"  # what left can come back, approximately
    LOSSY = "lossy"  # what left is gone


@dataclass(frozen=True)
class Request:
    """Everything a cache was asked for. ``budget`` None: none."""

    model: Any
    geometry: ModelGeometry
    budget: Budget | None
    checkpoint: str | None
    where: str | None
    capacity: int | None
    folder: str | None
    chunk: int | None
    page: int
    context: int | None
    batch: int

    @property
    def device(self) -> torch.device:
        """The device the model runs on."""
        return next(self.model.parameters()).device

    def refuse(self, method: str, *options: str) -> None:
        """Raise UsageError if one of ``options`` was given: ``method`` has no use for it."""
        for option in options:
            if getattr(self, option) is not None:
                raise UsageError(f"Method '{method}' takes no {option}; 'kv-direct' does.")

    def bounded(self, method: str, exactness: Exactness | None = None) -> tuple[int, int]:
        """Return the entries of each full layer and the chunk, which an exact method is free to choose. Raises
        UsageError without a budget, and UnsupportedModelError where a layer holds something else than keys and values.
        """
        if self.budget is None:
            raise UsageError(f"Method '{method}' needs a budget: entries (512), bytes (64MB), or a share (25%).")
        for layer in self.geometry.layers:
            if layer.kind not in ("full", "sliding", "shared"):
                raise UnsupportedModelError(
                    f"'{self.geometry.model_type}' has a '{layer.kind}' layer (layer {layer.index}), whose state is "
                    "not keys and values that could be rebuilt; use method 'full'."
                )
        exact = exactness is Exactness.EXACT
        least = min(self.chunk, MIN_CHUNK) if exact and self.chunk else self.chunk
        entries = self.budget.entries(self.geometry, context=self.context, batch=self.batch, chunk=least)
        layers = len(self.geometry.full_layers) if exact else 0
        return entries, self.budget.chunk_for(entries, self.chunk, layers)


class LiveFate(parts.Fate, Protocol):
    """A fate at work in one cache."""

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on."""

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved besides the checkpoint, under names that begin with ``fate.``."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave."""

    @property
    def compressed_bytes(self) -> int:
        """Bytes of entries kept in a smaller form."""

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of slots and tables."""


@dataclass(frozen=True)
class Plan:
    """What a method made of a request: the layers, and what they share. ``entries``: the effective budget of each
    full layer; ``chunk``: tokens of a prompt taken at a time; ``streams``: attention adds the past itself;
    ``budgets``: entries by layer and head, where they differ; ``positions``: those within the cache, if so; ``round``:
    of draft and verify, where drafts can be made."""

    layers: list[Any]
    entries: int | None = None
    chunk: int = 0
    streams: bool = False
    spec: CheckpointSpec | None = None
    checkpoint: Checkpoint | None = None
    fate: LiveFate | None = None
    budgets: Sequence[Sequence[int]] | None = None
    positions: CachePositions | None = None
    round: Round | None = None
