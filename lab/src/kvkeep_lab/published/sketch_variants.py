"""``sketch-variants``: count sketches that KVReviver does not have.

Averaged cells are divided by their number of vectors, which a sketch counts exactly. An estimate is then the median of
means instead of sums, and therefore no longer than a vector.

Centred estimates use deviations from the mean of all added vectors, which a sketch has exactly. Shrunk estimates
multiply the deviation by 1 / (1 + c load), the best factor where all vectors have the same variance. Here c times the
load is an estimate's variance in units of the vectors' variance; c is :data:`MEDIAN` of r rows for the median, 1 / r
for the mean.

The mean of an entry's cells is linear, so products with estimates follow from products with the cells, without
computing any estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.attention.portable import summed
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UsageError, unknown
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.meter import Meter
from kvkeep.policies.fates.sketch import Sketch
from kvkeep.stores.evicted.sketch import ROWS, CountSketch, Estimates
from kvkeep.stores.evicted.sketched import Hashed, Sketched

MEDIAN = {1: 1.0, 3: 0.4487, 5: 0.2868}
"""By number: the variance of the median of that number of standard normal variables (KVReviver, appendix E, Eq. 2)."""

_CHOICES = {
    "estimate": ("plain", "centred", "shrunk"),
    "by": ("median", "mean"),
    "keys": ("unsigned", "averaged", "signed"),
}


@dataclass(frozen=True)
class SketchVariants(Sketch):
    """Part of the budget is a count sketch with other estimates or signs than the paper's, the rest exact entries."""

    estimate: str = "plain"
    """The kind of estimate: "plain", "centred" or "shrunk"."""
    by: str = "median"
    """How an estimate combines the rows: "median" or "mean"."""
    keys: str = "unsigned"
    """Whether keys have random signs, as values do: "signed" or "unsigned"; "averaged" keys are unsigned, and a cell is
    divided by the number of its keys."""

    source: ClassVar[str] = "variants of KVReviver, Algorithms 1 to 4"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in _CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise unknown(f"sketch: {name}", given, choices)
        if self.keys == "averaged" and self.estimate != "plain":
            raise UsageError(
                f"keys=averaged is an estimate already; use it with estimate=plain, not '{self.estimate}'."
            )

    def slots(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
        entry, (cell, total) = (layer.key_dim + layer.value_dim) * geometry.dtype_bytes, self._tallies(layer)
        nbytes = super().slots(layer, geometry, entries) * ROWS * entry
        return max(1, (nbytes - total) // (ROWS * (entry + cell)))

    def _tallies(self, layer: LayerGeometry) -> tuple[int, int]:
        """Return the bytes of float32 tallies: the counts of keys and values for each cell, and their sums over all
        cells."""
        if self.estimate == "plain":
            return 4 * (self.keys == "averaged"), 0
        return 8, 4 * (layer.key_dim + layer.value_dim)

    def store(self, site: Site, shared: Hashed) -> EvictedStore:
        return VariantSketched(self, shared, self.slots(site.layer, site.geometry, site.entries), site)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        found, (cell, total) = super().holds(layer, geometry, entries, left), self._tallies(layer)
        tallies = ROWS * self.slots(layer, geometry, entries) * cell + total if sum(left) else 0
        return replace(found, compressed=found.compressed + layer.kv_heads * tallies)


class VariantSketched(Sketched):
    """Sketches of one layer with the estimates and signs of ``how``."""

    def __init__(self, how: SketchVariants, hashed: Hashed, slots: int, site: Site) -> None:
        super().__init__(hashed, slots, how.swap, site.meter, site.first)
        self.how = how

    def empty(self, keys: Tensor, values: Tensor) -> tuple[CountSketch, CountSketch]:
        tallies, averaged = self.how.estimate != "plain", self.how.keys == "averaged"
        signed = self.how.keys == "signed"
        return (
            TalliedSketch(len(keys), ROWS, self.size, keys.shape[-1], signed, tallies, averaged, like=keys),
            TalliedSketch(len(values), ROWS, self.size, values.shape[-1], True, tallies, like=values),
        )

    def estimates(self, slots: Tensor) -> tuple[Estimates, Estimates]:
        assert self.sketches is not None and self.inside is not None
        at = self.hashed.at(slots, self.size)
        count = None if self.how.estimate == "plain" else self.inside.sum(1)
        keys, values = (
            sketch.variant(at, self.how.by, count, self.how.estimate == "shrunk", self.meter)
            for sketch in self.sketches
            if isinstance(sketch, TalliedSketch)
        )
        return keys, values


class TalliedSketch(CountSketch):
    """A sketch with data for other estimates. tallies: for centred ones. averaged: for averaged ones, whose vectors
    have no signs."""

    def __init__(
        self,
        lanes: int,
        rows: int,
        slots: int,
        dim: int,
        signed: bool,
        tallies: bool = False,
        averaged: bool = False,
        *,
        like: Tensor,
    ) -> None:
        super().__init__(lanes, rows, slots, dim, signed, like=like)
        self.averaged = averaged
        self.total: Tensor | None = None  # the sum of all vectors, (lanes, 1, dim) float32
        self.counts: Tensor | None = None  # the sum of signs in each cell, (lanes, cells, 1) float32
        if tallies:
            self.total = like.new_zeros(lanes, 1, dim, dtype=torch.float32)
        if tallies or averaged:
            self.counts = like.new_zeros(lanes, rows * slots, 1, dtype=torch.float32)

    def add(self, at: Tensor, vectors: Tensor, there: Tensor | None, times: int) -> tuple[Tensor, Tensor]:
        index, factor = super().add(at, vectors, there, times)
        if self.counts is not None:
            self.counts.view(-1).index_add_(0, index.flatten(), factor.flatten().float())
        if self.total is not None:
            present = vectors if there is None else vectors * there[..., None]
            self.total.add_(summed(present.float(), 1), alpha=times)
        return index, factor

    def variant(
        self, at: Tensor, by: str, count: Tensor | None = None, shrink: bool = False, meter: Meter | None = None
    ) -> Estimates:
        """Return estimates of vectors. by: "median" or "mean" of their slots. count: the number of vectors in the
        sketch, (lanes,), for centred estimates. shrink: shrink these."""
        cells, mean = self.cells, None
        if self.averaged:
            assert self.counts is not None
            cells = (cells / self.counts.clamp(min=1)).to(cells.dtype)
        if count is not None:
            assert self.counts is not None and self.total is not None
            mean = self.total / count.clamp(min=1)[:, None, None]
            deviation = cells - self.counts * mean
            if shrink:
                spread = MEDIAN[self.rows] if by == "median" else 1 / self.rows
                deviation /= 1 + spread / self.slots * count[:, None, None]
            cells = deviation.to(cells.dtype)
        return VariantEstimates(self.by_place(cells), at, meter or Meter(), mean, by)

    def state(self) -> list[Tensor]:
        return [part for part in (self.cells, self.total, self.counts) if part is not None]

    def restore(self, state: list[Tensor]) -> None:
        names = [name for name in ("cells", "total", "counts") if getattr(self, name) is not None]
        for name, part in zip(names, state, strict=True):
            setattr(self, name, part)


class VariantEstimates(Estimates):
    """Medians or means of cells, with :attr:`mean` added."""

    def scores(self, query: Tensor) -> Tensor:
        if self.by == "mean":
            # The products of each cell with each query; an entry's product is the mean over its cells.
            lanes, rows, _ = query.shape
            products = (self.cells @ query.to(self.cells.dtype).transpose(1, 2)).float().view(-1, rows)
            picked = products.index_select(0, self.index(self.at).flatten()).view(len(self.at), lanes, -1, rows)
            scores = picked.mean(0).transpose(1, 2)
        else:
            scores = super().scores(query)
        # With a query in the cells' dtype, as the cells are multiplied.
        return scores if self.mean is None else scores + query.to(self.cells.dtype).float() @ self.mean.transpose(1, 2)

    def mix(self, weights: Tensor) -> Tensor:
        if self.by == "mean":
            lanes, rows, _ = weights.shape
            gathered = weights.new_zeros(lanes * self.cells.shape[1], rows)
            given = weights.transpose(1, 2).reshape(-1, rows) / len(self.at)
            for row in self.index(self.at).long():  # with int32 index_add_ is eight times as slow on a CPU
                gathered.index_add_(0, row.flatten(), given)
            mixed = gathered.view(lanes, -1, rows).transpose(1, 2) @ self.cells.float()
        else:
            mixed = super().mix(weights)
        return mixed if self.mean is None else mixed + weights.sum(2, keepdim=True) * self.mean

    def dense(self, dtype: torch.dtype) -> Tensor:
        written = self.written(self.at)
        return (written if self.mean is None else written + self.mean).to(dtype)

    def written(self, at: Tensor) -> Tensor:
        if self.by != "mean":
            return super().written(at)
        rows, lanes, count = at.shape
        picked = self.cells.view(-1, self.cells.shape[2]).index_select(0, self.index(at).flatten())
        with self.meter.holding(picked):
            return picked.view(rows, lanes, count, -1).mean(0)
