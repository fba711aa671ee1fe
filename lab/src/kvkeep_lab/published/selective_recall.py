"""Recalls of some entries: the base class of ``pages`` and ``fetch-on-miss``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.recall import Reader, Recall
from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep_lab.published.by_hand import picks
from kvkeep_lab.published.page_bounds import PAGE, bounds_elements
from kvkeep_lab.published.selective import Selective


@dataclass(frozen=True)
class SelectiveRecall(Recall):
    """A recall of the pages that :meth:`choose` selects by bounds on scores, or of the entries that :meth:`fetch`
    selects after a step."""

    exactness: ClassVar[Exactness | None] = Exactness.REVERSIBLE
    fetches: ClassVar[bool] = False
    """After a step, entries become resident again (:meth:`fetch`)."""

    def refuses(self, method: Any) -> str | None:
        if method.fate.stores.merges or method.fate.stores.makes_room:
            return (
                "Recall would bring back an entry that has also been merged into others, and attention would "
                "count it twice."
            )
        if getattr(method.fate, "swap", 0):
            return (
                "With swap above 0, estimates become resident again, and the recall cannot bring back the exact "
                "entries; use swap=0."
            )
        return None

    def reader(self, site: Site, shared: Any) -> Reader:
        """Return the reader of a layer. Raises UsageError for a checkpoint that cannot return single entries."""
        assert site.checkpoint is not None
        if not picks(site.checkpoint.spec, site.model):
            raise UsageError(
                "Recalling single entries needs checkpoint kind 'kv' or 'residual' (where one process has all "
                "heads): the others rebuild all."
            )
        return Selective(site, self)

    def choose(self, excess: Tensor) -> Tensor | None:
        """Return which pages each lane recalls, (lanes, pages) bool; None: no pages. excess: (lanes, heads, queries,
        pages), the logarithm of the maximum that a page can add to the sum of attention so far, which counts as 1."""
        return None

    def fetch(self, bounds: Tensor, tokens: Tensor | int, free: Callable[[int], Tensor], away: Tensor) -> Tensor:
        """Return which slots come back after a step, (lanes, n) int64, -1 for none. Called only where the recall
        :attr:`fetches`.

        bounds: (lanes, pages), the logarithm of the maximum attention that any query can have given to any entry of a
        page. tokens: the number of tokens so far, (lanes, 1). free: a function from a limit to the number of entries
        that each lane can take in, (lanes, 1). away: (lanes, slots of whole pages) bool, which slots can come back."""
        raise NotImplementedError

    def recalled(self, away: int) -> int:
        """Return the maximum number of a KV head's ``away`` evicted entries that come back for a step."""
        return away

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> PredictedBytes:
        """Return the bytes of the bounds of all pages, and of the recalled entries: they are gathered where they are
        less than half, of residuals from the entries of all evicted tokens."""
        bounds = bounds_elements(layer.kv_heads * layer.key_dim, tokens)
        recalled = max(min(self.recalled(away), tokens // 2 + PAGE), away)
        entry = layer.entry_elements * geometry.dtype_bytes
        return PredictedBytes(bookkeeping=bounds * geometry.dtype_bytes, workspace=recalled * entry)
