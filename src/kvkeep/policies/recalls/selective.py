"""Recalls of some entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.contracts.site import PredictedBytes, Site
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.stores.readers.bounds import PAGE, Bounds, bounds_elements
from kvkeep.stores.readers.selective import ScoreBounds, Selective


@dataclass(frozen=True)
class SelectiveRecall(Recall):
    """A recall of what :meth:`choose` selects by bounds on scores: pages of entries, or entries."""

    exactness: ClassVar[Exactness | None] = Exactness.REVERSIBLE
    reads_single: ClassVar[bool] = True
    fetches: ClassVar[bool] = False

    def reader(self, site: Site, shared: Any) -> Reader:
        return Selective(site, self, self.bounds())  # type: ignore[arg-type]

    def bounds(self) -> ScoreBounds:
        """Return the bounds of a layer without entries."""
        return Bounds()

    def choose(self, excess: Tensor, slack: Tensor) -> Tensor | None:
        """Return which pages each lane recalls: here none (:class:`kvkeep.stores.readers.selective.PageChoice`)."""
        return None

    def entries(self, away: int) -> int:
        """Return the maximum number of a KV head's ``away`` evicted entries that come back for a step."""
        return away

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> PredictedBytes:
        """Return the bytes of the bounds of all pages, and of the recalled entries, which are gathered where they are
        less than half."""
        bounds = self.bound_bytes(layer, geometry, tokens)
        recalled = min(self.entries(away), tokens // 2 + PAGE)
        return PredictedBytes(bookkeeping=bounds, workspace=recalled * layer.entry_elements * geometry.dtype_bytes)

    def bound_bytes(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int) -> int:
        """Return the bytes of a layer's bounds after ``tokens`` tokens."""
        return bounds_elements(layer.kv_heads * layer.key_dim, tokens) * geometry.dtype_bytes
