"""A count sketch of vectors: few cells hold sums of many vectors, and each vector can be estimated from them.

A sketch has r rows of b slots. A hash gives each id one slot in each row. Its vector is added there, times a hashed
sign of ±1 where the sketch is signed (Charikar, Chen and Farach-Colton, 2002; KVReviver's Algorithms 1 and 2, which
call the rows buckets). With n ids, n / b share a slot: the *load*. An estimate is the median of the r slots, element by
element, or their mean. The mean is linear, so products with estimates follow from products with the cells, without
computing any estimate.

Averaged cells are divided by their number of vectors, which a sketch counts exactly. An estimate is then the median of
means instead of sums, and therefore no longer than a vector (KVReviver does not divide).

Centred estimates use deviations from the mean of all added vectors, which a sketch has exactly. Shrunk estimates
multiply the deviation by 1 / (1 + c load), the best factor where all vectors have the same variance. Here c times the
load is an estimate's variance in units of the vectors' variance; c is :data:`MEDIAN` of r rows for the median, 1 / r
for the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.attention.portable import summed
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.stores.hashes import scattered

MEDIAN = {1: 1.0, 3: 0.4487, 5: 0.2868}
"""By number: the variance of the median of that number of standard normal variables (KVReviver, appendix E, Eq. 2)."""

PAGE = 512
"""Estimates of a lane that are written out at once."""


def places(ids: Tensor, rows: int, slots: int, seed: int = 0) -> Tensor:
    """Return where ``ids`` (...) are added, (rows, ...) int64: the number of the cell, plus ``rows * slots`` where the
    sign is -1."""
    row = torch.arange(rows, device=ids.device).view(-1, *[1] * ids.ndim)
    number = scattered(ids.long() + (row << 32) + (seed << 40))
    return (((number >> 1) * slots) >> 30) + row * slots + (number & 1) * (rows * slots)


class CountSketch:
    """Cells of some lanes. tallies: the sketch keeps the data for centred estimates. averaged: it keeps the data for
    averaged estimates, whose vectors have no signs.

    Places ``at`` are (rows, lanes, n), as :func:`places` returns them, int32 or int64. Vectors are (lanes, n, dim).
    there: (lanes, n) bool, which of them exist; None: all.
    """

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
        self.rows, self.slots, self.signed, self.averaged = rows, slots, signed, averaged
        self.cells = like.new_zeros(lanes, rows * slots, dim)
        self.total: Tensor | None = None  # the sum of all vectors, (lanes, 1, dim) float32
        self.counts: Tensor | None = None  # the sum of signs in each cell, (lanes, cells, 1) float32
        if tallies:
            self.total = like.new_zeros(lanes, 1, dim, dtype=torch.float32)
        if tallies or averaged:
            self.counts = like.new_zeros(lanes, rows * slots, 1, dtype=torch.float32)

    def insert(self, at: Tensor, vectors: Tensor, there: Tensor | None = None) -> None:
        self._add(at, vectors, there, 1)

    def delete(self, at: Tensor, vectors: Tensor, there: Tensor | None = None) -> None:
        """Subtract vectors: those that were added, or their estimates."""
        self._add(at, vectors, there, -1)

    def _add(self, at: Tensor, vectors: Tensor, there: Tensor | None, times: int) -> None:
        lanes, size, dim = self.cells.shape
        factor = torch.where(at >= size, -times, times) if self.signed else torch.full_like(at, times)
        factor = (factor if there is None else factor * there).to(vectors.dtype)
        lane = torch.arange(lanes, dtype=at.dtype, device=at.device)[:, None] * size
        index = (at % size + lane).flatten()
        self.cells.view(-1, dim).index_add_(0, index, (vectors * factor[..., None]).reshape(-1, dim))
        if self.counts is not None:
            self.counts.view(-1).index_add_(0, index, factor.flatten().float())
        if self.total is not None:
            present = vectors if there is None else vectors * there[..., None]
            self.total.add_(summed(present.float(), 1), alpha=times)

    def query(self, at: Tensor) -> Tensor:
        """Return the medians, (lanes, n, dim)."""
        return self.estimates(at, "median").dense(self.cells.dtype)

    def estimates(
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
        cells = torch.cat([cells, -cells if self.signed else cells], 1)  # signed cells are looked up by place
        return Estimates(cells, at, mean, by, meter or Meter())

    def select(self, lanes: Tensor) -> None:
        self.restore([part.index_select(0, lanes) for part in self.state()])

    def state(self) -> list[Tensor]:
        return [part for part in (self.cells, self.total, self.counts) if part is not None]

    def restore(self, state: list[Tensor]) -> None:
        names = [name for name in ("cells", "total", "counts") if getattr(self, name) is not None]
        for name, part in zip(names, state, strict=True):
            setattr(self, name, part)

    @property
    def nbytes(self) -> int:
        return nbytes(*self.state())


@dataclass(frozen=True)
class Estimates:
    """Estimated keys or values, which compute products without decoding (:class:`~kvkeep.step.plan.Coded`)."""

    layout: ClassVar[str] = "sketched"

    cells: Tensor
    """(lanes, 2 cells, dim), by place."""
    at: Tensor
    """The places of the entries, (rows, lanes, n)."""
    mean: Tensor | None
    """(lanes, 1, dim) float32, the mean of the vectors where cells are deviations from it; else None."""
    by: str
    """How an estimate follows from its cells: "median" or "mean"."""
    meter: Meter

    def part(self, start: int, stop: int) -> Estimates:
        return replace(self, at=self.at[:, :, start:stop])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.cells.shape[0], 1, self.at.shape[2], self.cells.shape[2]

    def scores(self, query: Tensor) -> Tensor:
        lanes, rows, _ = query.shape
        query = query.to(self.cells.dtype)
        if self.by == "mean":
            # The products of each cell with each query; an entry's product is the mean over its cells.
            products = (self.cells @ query.transpose(1, 2)).float().view(-1, rows)
            picked = products.index_select(0, self._index(self.at).flatten()).view(len(self.at), lanes, -1, rows)
            scores = picked.mean(0).transpose(1, 2)
        else:
            scores = torch.cat([query @ page.transpose(1, 2) for _, page in self._pages()], 2).float()
        return scores if self.mean is None else scores + query.float() @ self.mean.transpose(1, 2)

    def mix(self, weights: Tensor) -> Tensor:
        lanes, rows, _ = weights.shape
        if self.by == "mean":
            gathered = weights.new_zeros(lanes * self.cells.shape[1], rows)
            given = weights.transpose(1, 2).reshape(-1, rows) / len(self.at)
            for row in self._index(self.at).long():  # with int32 index_add_ is eight times as slow on a CPU
                gathered.index_add_(0, row.flatten(), given)
            mixed = gathered.view(lanes, -1, rows).transpose(1, 2) @ self.cells.float()
        else:
            mixed = weights.new_zeros(lanes, rows, self.cells.shape[2])
            for start, page in self._pages():
                mixed += weights[:, :, start : start + page.shape[1]].to(page.dtype) @ page
        return mixed if self.mean is None else mixed + weights.sum(2, keepdim=True) * self.mean

    def dense(self, dtype: torch.dtype) -> Tensor:
        written = self._written(self.at)
        return (written if self.mean is None else written + self.mean).to(dtype)

    def _pages(self) -> Iterator[tuple[int, Tensor]]:
        """Yield estimates without the mean, a page at a time, each page with the number of its first entry."""
        for start in range(0, self.at.shape[2], PAGE):
            yield start, self._written(self.at[:, :, start : start + PAGE])

    def _index(self, at: Tensor) -> Tensor:
        """Return places (rows, lanes, n) among the cells of all lanes."""
        lane = torch.arange(len(self.cells), dtype=at.dtype, device=at.device)[:, None]
        return at + lane * self.cells.shape[1]

    def _written(self, at: Tensor) -> Tensor:
        """Return the medians or means of cells, (lanes, n, dim)."""
        rows, lanes, count = at.shape
        picked = self.cells.view(-1, self.cells.shape[2]).index_select(0, self._index(at).flatten())
        with self.meter.holding(picked):
            parts = picked.view(rows, lanes, count, -1)
            if self.by == "mean":
                return parts.mean(0)
            if rows != 3:
                return parts.median(0).values
            one, two, three = parts
            low, high = torch.minimum(one, two), torch.maximum(one, two)
            return torch.maximum(low, torch.minimum(high, three, out=high), out=low)
