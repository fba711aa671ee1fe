"""A count sketch of vectors: few cells hold sums of many vectors, and each vector can be estimated from them.

A sketch has r rows of b slots. A hash gives each id one slot in each row. Its vector is added there, times a hashed
sign of ±1 where the sketch is signed (Charikar, Chen and Farach-Colton, 2002; KVReviver's Algorithms 1 and 2, which
call the rows buckets). With n ids, n / b share a slot: the *load*. An estimate is the median of the r slots, element by
element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.attention.portable import scattered
from kvkeep.memory.meter import Meter, nbytes
from kvkeep.step.products import product

ROWS = 3
"""The rows of a sketch, as in KVReviver."""

PAGE = 512
"""Estimates of a lane that are written out at once."""


def places(ids: Tensor, rows: int, slots: int, seed: int = 0) -> Tensor:
    """Return where ``ids`` (...) are added, (rows, ...) int64: the number of the cell, plus ``rows * slots`` where the
    sign is -1."""
    row = torch.arange(rows, device=ids.device).view(-1, *[1] * ids.ndim)
    number = scattered(ids.long() + (row << 32) + (seed << 40))
    return (((number >> 1) * slots) >> 30) + row * slots + (number & 1) * (rows * slots)


class CountSketch:
    """Cells of some lanes, (lanes, rows * slots, dim), of the dtype and device of ``like``.

    Places ``at`` are (rows, lanes, n), as :func:`places` returns them, int32 or int64. Vectors are (lanes, n, dim).
    there: (lanes, n) bool, which of them exist; None: all.
    """

    def __init__(self, lanes: int, rows: int, slots: int, dim: int, signed: bool, *, like: Tensor) -> None:
        self.rows, self.slots, self.signed = rows, slots, signed
        self.cells = like.new_zeros(lanes, rows * slots, dim)

    def insert(self, at: Tensor, vectors: Tensor, there: Tensor | None = None) -> None:
        self.add(at, vectors, there, 1)

    def delete(self, at: Tensor, vectors: Tensor, there: Tensor | None = None) -> None:
        """Subtract vectors: those that were added, or their estimates."""
        self.add(at, vectors, there, -1)

    def add(self, at: Tensor, vectors: Tensor, there: Tensor | None, times: int) -> tuple[Tensor, Tensor]:
        """Add vectors ``times`` 1 or -1. Return the number of the cell of each among those of all lanes, and the factor
        with which the vector was added there, (rows, lanes, n) each."""
        lanes, size, dim = self.cells.shape
        factor = torch.where(at >= size, -times, times) if self.signed else torch.full_like(at, times)
        factor = (factor if there is None else factor * there).to(vectors.dtype)
        index = at % size + torch.arange(lanes, dtype=at.dtype, device=at.device)[:, None] * size
        added = (vectors * factor[..., None]).reshape(-1, dim)
        self.cells.view(-1, dim).index_add_(0, index.flatten(), added)
        return index, factor

    def query(self, at: Tensor) -> Tensor:
        """Return the medians, (lanes, n, dim)."""
        return self.estimates(at).dense(self.cells.dtype)

    def estimates(self, at: Tensor, meter: Meter | None = None) -> Estimates:
        """Return estimates of vectors."""
        return Estimates(self.by_place(self.cells), at, meter or Meter())

    def by_place(self, cells: Tensor) -> Tensor:
        """Return cells by place, (lanes, 2 cells, dim): as they are, and as vectors with the sign -1 read them."""
        return torch.cat([cells, -cells if self.signed else cells], 1)

    def select(self, lanes: Tensor) -> None:
        self.restore([part.index_select(0, lanes) for part in self.state()])

    def state(self) -> list[Tensor]:
        """Return the tensors to save."""
        return [self.cells]

    def restore(self, state: list[Tensor]) -> None:
        (self.cells,) = state

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
    meter: Meter
    mean: Tensor | None = None
    """(lanes, 1, dim) float32, added to each estimate. Only subclasses have one."""
    by: str = "median"
    """How an estimate follows from its cells: by their median, or in subclasses by their "mean"."""

    def part(self, start: int, stop: int) -> Estimates:
        return replace(self, at=self.at[:, :, start:stop])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.cells.shape[0], 1, self.at.shape[2], self.cells.shape[2]

    def scores(self, query: Tensor) -> Tensor:
        query = query.to(self.cells.dtype)
        return torch.cat([product(query, page.transpose(1, 2)) for _, page in self._pages()], 2)

    def mix(self, weights: Tensor) -> Tensor:
        mixed = weights.new_zeros(*weights.shape[:2], self.cells.shape[2])
        for start, page in self._pages():
            mixed += product(weights[:, :, start : start + page.shape[1]].to(page.dtype), page)
        return mixed

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.written(self.at).to(dtype)

    def _pages(self) -> Iterator[tuple[int, Tensor]]:
        """Yield estimates a page at a time, each page with the number of its first entry."""
        for start in range(0, self.at.shape[2], PAGE):
            yield start, self.written(self.at[:, :, start : start + PAGE])

    def index(self, at: Tensor) -> Tensor:
        """Return places (rows, lanes, n) among the cells of all lanes."""
        lane = torch.arange(len(self.cells), dtype=at.dtype, device=at.device)[:, None]
        return at + lane * self.cells.shape[1]

    def written(self, at: Tensor) -> Tensor:
        """Return the medians of cells, (lanes, n, dim)."""
        rows, lanes, count = at.shape
        picked = self.cells.view(-1, self.cells.shape[2]).index_select(0, self.index(at).flatten())
        with self.meter.holding(picked):
            parts = picked.view(rows, lanes, count, -1)
            if rows != 3:
                return parts.median(0).values
            one, two, three = parts
            low, high = torch.minimum(one, two), torch.maximum(one, two)
            return torch.maximum(low, torch.minimum(high, three, out=high), out=low)
