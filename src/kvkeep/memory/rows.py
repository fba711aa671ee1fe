"""Rows of a tensor that arrive in order: stores of them.

A *row* belongs to one token: keys (batch, heads, **rows**, dim), residuals
(batch, **rows**, dim), ids (batch, **rows**, 1). The row axis is always the last but one, the batch
axis the first. Rows are numbered by *slot*: their place in the sequence, padding included, from 0.

* :class:`Buffer`: one contiguous tensor that grows by blocks. Reading is a view.
* :class:`Ring`: the last ``capacity`` rows; row s lies at index s mod capacity. Nothing ever moves.
* :class:`~kvkeep.memory.pages.PagedRows`: all rows, in pages that are allocated once and never moved. Of
  :class:`~kvkeep.memory.pages.RecentPages` the oldest are freed.
* :class:`~kvkeep.memory.shared_rows.SharedRows`: all rows, whose first blocks several owners share.

One test compares all of them with a plain tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.memory.disk_rows import check_read, checked, lost
from kvkeep.memory.places import Place

BLOCK = 256


class Rows(ABC):
    """A store of rows; it holds the slots ``first <= slot < length``. The defaults of this class are those of a
    store without the optional capabilities."""

    first = 0
    length = 0
    lends = False
    """Whether other stores may hold the tensors of :meth:`freeze`, which take no memory."""
    beginning: Rows | None = None
    """A copy of the first rows, for a store that has lost later ones."""
    pages: Sequence[Tensor] = ()
    """All tensors in order, each of rows that follow one another."""
    starts: Sequence[int] = ()
    """The first slot of each page."""

    @abstractmethod
    def append(self, rows: Tensor) -> None:
        """Append ``rows``; drop the oldest rows beyond the capacity."""

    def adopt(self, rows: Tensor) -> None:
        """Append ``rows``, which never change, without a copy where this store can hold the tensor itself."""
        self.append(rows)

    def holds(self, rows: Tensor) -> bool:
        """Return whether :meth:`adopt` would hold ``rows`` themselves."""
        return False

    def freeze(self, length: int) -> list[Tensor]:
        """Return those of the first ``length`` rows that other stores can hold, too, in pieces. From now on they never
        change."""
        return []

    def next_row(self) -> tuple[Tensor, int] | None:
        """Return the tensor and index of the next row; None where memory has to be allocated first."""
        return None

    def advance(self) -> None:
        """Count the next row, which the caller wrote at the place where :meth:`append` would have."""
        raise NotImplementedError

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (slot, view) pieces of the rows ``start``..``stop``, in order."""

    def pick(self, lane: Tensor, slot: Tensor) -> Tensor:
        """Return copies of single rows, (n, width): ``lane`` (n,) counts all axes before the rows', ``slot`` (n,)."""
        raise NotImplementedError

    def passages(self, numbers: Tensor, size: int) -> Tensor:
        """Return copies of passages of ``size`` rows, (lanes, n, ``size``, width). ``numbers`` (lanes, n): the passage
        of each lane, counted from 0. ``size`` divides the smallest page, so a passage lies in one page."""
        raise NotImplementedError

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Remove the rows from slot ``length`` on."""

    def select(self, index: Tensor) -> None:
        """Replace the batch by the rows of ``index`` (repeats and reorders allowed)."""
        raise NotImplementedError

    def compare(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Raise EntriesLost if the pages on disk that hold ``rows`` differ from what was written."""

    def damaged(self, compare: bool) -> bool:
        """Return whether rows on disk could not be read; with ``compare``, or differ from what was written."""
        return False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""


def selected(data: Tensor, index: Tensor, home: Place | None = None, writable: bool = True) -> Tensor:
    """Pick ``index`` along the batch: in place where the shape still fits and the tensor is ``writable``, else in
    new memory, of ``home`` if given."""
    picked = data.index_select(0, index.to(data.device))
    check_read(data)
    if writable and data.shape == picked.shape:
        return data.copy_(picked)
    return picked if home is None else home.allocate(tuple(picked.shape), picked.dtype).copy_(picked)


def picked(data: Tensor, lane: Tensor, index: Tensor) -> Tensor:
    """Gather rows of ``data`` (..., rows, width) by lane and place, on the device of ``data``."""
    return data.flatten(0, -2).index_select(0, lane.to(data.device) * data.shape[-2] + index.to(data.device))


class _OneTensor(Rows):
    """Rows in one tensor, allocated with the first rows, in ``home`` if given."""

    home: Place | None = None

    def __init__(self, block: int) -> None:
        self.block = block
        self.data: Tensor | None = None

    def truncate(self, length: int) -> None:
        """Remove the rows from slot ``length`` on. Memory stays allocated, and overwritten rows are not restored."""
        self.length = min(self.length, length)
        self.first = min(self.first, self.length)

    def select(self, index: Tensor) -> None:
        if self.data is not None:
            self.data = selected(self.data, index, self.home)

    def damaged(self, compare: bool) -> bool:
        return checked(self.home) and lost([self.data])

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else self.data.nbytes


class Buffer(_OneTensor):
    """One contiguous tensor, grown by whole blocks, so that most appends copy only the new rows.

    ``home``: where the tensor lies, by default with the rows. There it grows by half, because each growth is an
    allocation.
    """

    def __init__(self, block: int = BLOCK, home: Place | None = None) -> None:
        super().__init__(block)
        self.home = home

    def append(self, rows: Tensor) -> None:
        stop = self.length + rows.shape[-2]
        if self.data is None or stop > self.data.shape[-2]:
            self._grow(rows, stop)
        assert self.data is not None
        self.data.narrow(-2, self.length, rows.shape[-2]).copy_(rows)
        self.length = stop

    def _grow(self, rows: Tensor, needed: int) -> None:
        least = needed if self.home is None else max(needed, 3 * self.length // 2, 1)
        shape = *rows.shape[:-2], up(least, self.block), rows.shape[-1]
        with torch.inference_mode(False):  # tensors created in it are read-only outside
            grown = rows.new_empty(shape) if self.home is None else self.home.allocate(shape, rows.dtype)
        if self.data is not None:
            grown[..., : self.length, :] = self.data[..., : self.length, :]
            check_read(self.data)
        self.data = grown

    def advance(self) -> None:
        self.length += 1

    def view(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the rows ``start``..``stop`` without copying."""
        assert self.data is not None
        return self.data.narrow(-2, start, max(0, (self.length if stop is None else stop) - start))

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        if start < stop:
            yield start, self.view(start, stop)

    def pick(self, lane: Tensor, slot: Tensor) -> Tensor:
        assert self.data is not None
        return picked(self.data, lane, slot)


class Ring(_OneTensor):
    """The last ``capacity`` rows at fixed indices: row s lies at s mod capacity, nothing is ever moved.

    Memory grows by blocks until the capacity is reached, then never again.
    """

    home: Place

    def __init__(self, capacity: int, home: Place, block: int = BLOCK) -> None:
        super().__init__(block)
        self.capacity, self.home = capacity, home

    def append(self, rows: Tensor) -> None:
        """Append ``rows``; they overwrite those ``capacity`` slots before them."""
        count = rows.shape[-2]
        stop = self.length + count
        first = max(self.first, stop - self.capacity)
        index = self.length % self.capacity if self.capacity else 0
        if self.data is not None and index + count <= min(self.data.shape[-2], self.capacity):
            self.data.narrow(-2, index, count).copy_(rows)
            self.first, self.length = first, stop
            return
        start = max(self.length, first)
        if start < stop:
            self._reserve(rows, min(stop, self.capacity))
            fresh = rows[..., start - self.length :, :]
            for slot, target in self._pieces(start, stop):
                target.copy_(fresh[..., slot - start : slot - start + target.shape[-2], :])
        self.first, self.length = first, stop

    def advance(self) -> None:
        self.length += 1
        self.first = max(self.first, self.length - self.capacity)

    def _reserve(self, rows: Tensor, needed: int) -> None:
        allocated = 0 if self.data is None else self.data.shape[-2]
        if needed <= allocated:
            return
        size = ring_rows(needed, self.capacity, self.block)
        grown = self.home.allocate((*rows.shape[:-2], size, rows.shape[-1]), rows.dtype)
        if self.data is not None:
            grown[..., :allocated, :] = self.data
            check_read(self.data)
        self.data = grown

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        assert self.data is not None
        while start < stop:
            index = start % self.capacity
            count = min(stop - start, self.capacity - index)
            yield start, self.data[..., index : index + count, :]
            start += count

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        if start < stop:
            yield from self._pieces(start, stop)

    def everything(self) -> Tensor | None:
        """Return all rows as one view: in the order of the ring when it is full, or where they do not wrap; else None.

        Attention without a mask does not depend on the order, so one view replaces two.
        """
        if self.data is None or self.first == self.length:
            return None
        if self.length - self.first == self.capacity:
            return self.data
        if self.first // self.capacity == (self.length - 1) // self.capacity:
            low = self.first % self.capacity
            return self.data[..., low : low + self.length - self.first, :]
        return None

    def pick(self, lane: Tensor, slot: Tensor) -> Tensor:
        assert self.data is not None
        return picked(self.data, lane, slot % self.capacity)


class JoinedRows:
    """The rows of two stores, for reading; the second store continues the first."""

    def __init__(self, before: Rows | None, after: Rows) -> None:
        self.stores = [after] if before is None else [before, after]
        self.first, self.length = self.stores[0].first, after.length

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        for rows in self.stores:
            low, high = max(start, rows.first), min(stop, rows.length)
            if low < high:
                yield from rows.read(low, high)

    def compare(self, rows: Sequence[int]) -> None:
        """Raise EntriesLost as :meth:`Rows.compare`."""
        for store in self.stores:
            store.compare(rows)


def up(count: int, block: int = BLOCK) -> int:
    """Return ``count`` rounded up to whole blocks: the allocated rows of a buffer."""
    return -(-count // block) * block


def ring_rows(needed: int, capacity: int, block: int = BLOCK) -> int:
    """Return the allocated rows of a ring of ``capacity`` after ``needed`` rows."""
    return min(capacity, up(needed, block))


def concatenated(rows: Rows | JoinedRows, start: int, stop: int) -> Tensor:
    """Return the rows ``start``..``stop`` of any store as one tensor, a view if they are contiguous. Rows of several
    devices are returned on that of the first ones."""
    pieces = [piece for _, piece in rows.read(start, stop)]
    return pieces[0] if len(pieces) == 1 else torch.cat([piece.to(pieces[0].device) for piece in pieces], dim=-2)
