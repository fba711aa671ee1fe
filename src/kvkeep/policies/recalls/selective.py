"""Recalls of some pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.contracts.site import PredictedBytes, Site
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.stores.readers.bounds import PAGE, bounds_elements
from kvkeep.stores.readers.selective import Selective


@dataclass(frozen=True)
class PagesThatMatter(Recall):
    """A recall of the pages that :meth:`choose` selects."""

    exactness: ClassVar[Exactness | None] = Exactness.REVERSIBLE
    reads_single: ClassVar[bool] = True
    fetches: ClassVar[bool] = False

    def reader(self, site: Site, round: Any) -> Reader:
        return Selective(site, self)  # type: ignore[arg-type]

    def choose(self, excess: Tensor) -> Tensor | None:
        """Return which pages each lane recalls: here none (:class:`kvkeep.stores.readers.selective.PageChoice`)."""
        return None

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> PredictedBytes:
        """Return the bytes of the bounds of all pages, and of the recalled entries, which are gathered where they are
        less than half."""
        bounds = bounds_elements(layer.kv_heads * layer.key_dim, tokens) * geometry.dtype_bytes
        recalled = min(self.entries(away), tokens // 2 + PAGE)
        return PredictedBytes(bookkeeping=bounds, workspace=recalled * layer.entry_elements * geometry.dtype_bytes)
