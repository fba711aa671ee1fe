"""Rows of a tensor that arrive in order: stores of them.

A *row* belongs to one token: keys (batch, heads, **rows**, dim), residuals
(batch, **rows**, dim), ids (batch, **rows**, 1). The row axis is always the last but one, the batch
axis the first. Rows are numbered by *slot*: their place in the sequence, padding included, from 0.

* :class:`Buffer`: one contiguous tensor that grows by blocks. Reading is a view.
* :class:`Ring`: the last ``capacity`` rows; row s lies at index s mod capacity. Nothing ever moves.
* :class:`PagedRows`: all rows, in pages that are allocated once and never moved. Of
  :class:`~kvkeep.memory.recent_pages.RecentPages` the oldest are freed.

These and :class:`~kvkeep.memory.shared_rows.SharedRows`, whose first blocks several owners share, have one protocol.
One test compares all of them with a plain tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.errors import EntriesLost
from kvkeep.memory.disk_rows import Digests, check_read, checked, lost
from kvkeep.memory.places import Place

BLOCK = 256
MAX_PAGE_ROWS = 1024
"""Rows of the largest page of a text of at most 65,536 tokens."""


class Rows(Protocol):
    """The protocol of all stores of rows; they hold the slots ``first <= slot < length``."""

    first: int
    length: int

    def append(self, rows: Tensor) -> None:
        """Append ``rows``; drop the oldest rows beyond the capacity."""

    def adopt(self, rows: Tensor) -> None:
        """Append ``rows``, without a copy where this store can hold the tensor itself."""

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (slot, view) pieces of the rows ``start``..``stop``, in order."""

    def pick(self, lane: Tensor, slot: Tensor) -> Tensor:
        """Return copies of single rows, (n, width): ``lane`` (n,) counts all axes before the rows', ``slot`` (n,)."""

    def advance(self) -> None:
        """Count the next row, which the caller wrote at the place where :meth:`append` would have."""

    def truncate(self, length: int) -> None:
        """Remove the rows from slot ``length`` on."""

    def select(self, index: Tensor) -> None:
        """Replace the batch by the rows of ``index`` (repeats and reorders allowed)."""

    def damaged(self, compare: bool) -> bool:
        """Return whether rows on disk could not be read; with ``compare``, or have other bytes than were written."""

    @property
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


def _pick(data: Tensor, lane: Tensor, index: Tensor) -> Tensor:
    """Gather rows of ``data`` (..., rows, width) by lane and place, on the device of ``data``."""
    return data.flatten(0, -2).index_select(0, lane.to(data.device) * data.shape[-2] + index.to(data.device))


class _OneTensor(ABC):
    """Rows in one tensor, allocated with the first rows, in ``home`` if given."""

    home: Place | None = None

    def __init__(self, block: int) -> None:
        self.block = block
        self.first = 0
        self.length = 0
        self.data: Tensor | None = None

    @abstractmethod
    def append(self, rows: Tensor) -> None:
        """Append ``rows``."""

    def adopt(self, rows: Tensor) -> None:
        self.append(rows)

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
        return _pick(self.data, lane, slot)


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
        return _pick(self.data, lane, slot % self.capacity)


def pick_each(stores: Sequence[PagedRows], lane: Tensor, slot: Tensor) -> list[Tensor]:
    """Return the single rows of :meth:`Rows.pick` from each of several stores, whose pages begin at the same slots."""
    pages, starts = stores[0].pages, stores[0].starts
    lane, slot = lane.to(pages[0].device), slot.to(pages[0].device)
    if len(pages) == 1:
        return [_pick(rows.pages[0], lane, slot - starts[0]) for rows in stores]
    picked = [rows.pages[0].new_empty(len(slot), rows.pages[0].shape[-1]) for rows in stores]
    number_of = torch.bucketize(slot, torch.tensor(starts[1:], device=slot.device), right=True)
    for number, start in enumerate(starts):
        here = (number_of == number).nonzero().squeeze(1)
        place = lane.index_select(0, here) * pages[number].shape[-2] + slot.index_select(0, here) - start
        for rows, into in zip(stores, picked, strict=True):
            into.index_copy_(0, here, rows.pages[number].flatten(0, -2).index_select(0, place))
    return picked


class PagedRows:
    """All rows, in pages that are allocated once and never moved. A page holds the appended rows, or an eighth of the
    rows allocated before, between ``smallest`` and ``largest``. So little memory is unused, and reads are long. Pages
    of more than ``largest`` rows hold a 64th, because each page on disk is a mapping of the process."""

    def __init__(self, home: Place, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> None:
        self.home = home
        self.smallest = smallest
        self.largest = largest
        self.first = 0
        self.length = 0
        self.pages: list[Tensor] = []
        self.starts: list[int] = []
        self._fixed = 0  # the first rows, which never change, because other stores may read them
        self._digests = Digests(smallest) if checked(home) else None

    def append(self, rows: Tensor) -> None:
        """Append ``rows``; all new pages are allocated before one is written."""
        count = rows.shape[-2]
        if self.pages and (free := self._allocated - self.length) >= count and free <= self.pages[-1].shape[-2]:
            page = self.pages[-1]
            page.narrow(-2, page.shape[-2] - free, count).copy_(rows)
            self.length += count
            return self._completed()
        stop = self.length + count
        while stop > self._allocated:
            size = self._page_size(stop - self._allocated)
            self._make_space()
            page = self.home.allocate((*rows.shape[:-2], size, rows.shape[-1]), rows.dtype)
            self.starts.append(self._allocated)
            self.pages.append(page)
        start, self.length = self.length, stop
        for slot, target in self.read(start, stop):
            target.copy_(rows[..., slot - start : slot - start + target.shape[-2], :])
        return self._completed()

    def adopt(self, rows: Tensor) -> None:
        """Make ``rows``, which never change, the next page if this store :meth:`holds` them; otherwise append them."""
        if not self.holds(rows):
            return self.append(rows)
        self._make_space()
        self.starts.append(self.length)
        self.pages.append(rows)
        self.length += rows.shape[-2]
        self._fixed = self.length
        return self._completed()

    def _completed(self) -> None:
        """Make the digests of complete blocks."""
        if self._digests is not None:
            self._digests.add(self.pages, self.starts, self.length)

    def _page_size(self, missing: int) -> int:
        """Return the rows of the next page, given ``missing`` rows."""
        return page_rows(missing, self._allocated, self.smallest, self.largest)

    def _make_space(self) -> None:
        """Called before a page is added."""

    def holds(self, rows: Tensor) -> bool:
        """Return whether ``rows`` can be the next page: they are whole blocks, and the pages so far are full."""
        return self.home.maps and self.length == self._allocated and not rows.shape[-2] % self.smallest

    @property
    def lends(self) -> bool:
        """Whether other stores may hold the pages, too: they are in files, and take no memory."""
        return self.home.name == "disk"

    def freeze(self, length: int) -> list[Tensor]:
        """Return the whole blocks of the first ``length`` rows as views, several blocks each. From now on they never
        change."""
        stop = length // self.smallest * self.smallest
        self._fixed = max(self._fixed, stop)
        return [rows for _, rows in self.read(0, stop)]

    def next_row(self) -> tuple[Tensor, int] | None:
        """Return the page and index of the next row; None if a page has to be allocated first."""
        if not self.pages or not self.starts[-1] <= self.length < self._allocated:
            return None
        return self.pages[-1], self.length - self.starts[-1]

    def advance(self) -> None:
        self.length += 1
        if not self.length % self.smallest:
            self._completed()

    @property
    def _allocated(self) -> int:
        return self.starts[-1] + self.pages[-1].shape[-2] if self.pages else self.length

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        for origin, page in zip(self.starts, self.pages, strict=True):
            low, high = max(start, origin), min(stop, origin + page.shape[-2])
            if low < high:
                yield low, page[..., low - origin : high - origin, :]

    def pick(self, lane: Tensor, slot: Tensor) -> Tensor:
        return pick_each([self], lane, slot)[0]

    def blocks(self, numbers: Tensor, size: int) -> Tensor:
        """Return copies of blocks of ``size`` rows, (lanes, n, ``size``, width). ``numbers`` (lanes, n): the block of
        each lane, counted from 0. ``size`` divides the smallest page, so a block lies in one page."""
        device = self.pages[0].device
        numbers = numbers.to(device)
        self.compare((numbers.unique() * size).tolist())
        starts = torch.tensor(self.starts, device=device).div_(size, rounding_mode="floor")
        page = torch.bucketize(numbers.contiguous(), starts, right=True) - 1
        inside = numbers - starts[page]
        lanes = torch.arange(len(numbers), device=device)[:, None].expand_as(numbers)
        found = self.pages[0].new_empty(*numbers.shape, size, self.pages[0].shape[-1])
        for number in page.unique().tolist():
            here = page == number
            by_block = self.pages[number].unflatten(-2, (-1, size))
            found[here] = by_block[lanes[here], inside[here]]
        return found

    def compare(self, rows: Sequence[int]) -> None:
        """Raise EntriesLost if pages on disk that have ``rows`` are not as they were written."""
        if self._digests is not None and self._digests.differ(self.pages, self.starts, rows):
            raise EntriesLost

    def damaged(self, compare: bool) -> bool:
        if self._digests is None:
            return False
        return lost(self.pages) or (compare and self._digests.differ(self.pages, self.starts))

    def truncate(self, length: int) -> None:
        """Remove the rows from slot ``length`` on, and free the empty pages."""
        if length < self.length:
            self.length = length
            if self._digests is not None:
                self._digests.keep(self.first, length)
        while self.pages and self.starts[-1] >= self.length:
            self.pages.pop()
            self.starts.pop()
        if self.length < self._fixed:
            if self.length < self._allocated:  # other stores read the last page, and this one will write to it
                page = self.pages[-1]
                copied = self.home.allocate(tuple(page.shape), page.dtype).copy_(page)
                check_read(page)
                self.pages[-1] = copied
            self._fixed = self.starts[-1] if self.length < self._allocated else self.length

    def select(self, index: Tensor) -> None:
        self.pages = [
            selected(page, index, self.home, writable=start >= self._fixed)
            for start, page in zip(self.starts, self.pages, strict=True)
        ]
        self._fixed = 0
        if self._digests is not None:
            self._digests.keep(0, 0)
            self._completed()

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self.pages)


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


def up(count: int, block: int = BLOCK) -> int:
    """Return ``count`` rounded up to whole blocks: the allocated rows of a buffer."""
    return -(-count // block) * block


def ring_rows(needed: int, capacity: int, block: int = BLOCK) -> int:
    """Return the allocated rows of a ring of ``capacity`` after ``needed`` rows."""
    return min(capacity, up(needed, block))


def page_rows(missing: int, allocated: int, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> int:
    """Return the rows of the next page, given ``allocated`` rows and ``missing`` more."""
    limit = max(largest // smallest, allocated // (64 * smallest))
    return min(limit, max(-(-missing // smallest), allocated // (8 * smallest))) * smallest


def pages_of(counts: Iterable[int]) -> list[int]:
    """Return the rows of each page of :class:`PagedRows` after appending ``counts`` rows."""
    pages: list[int] = []
    allocated = needed = 0
    for count in counts:
        needed += count
        while allocated < needed:
            pages.append(page_rows(needed - allocated, allocated))
            allocated += pages[-1]
    return pages


def concatenated(rows: Rows | JoinedRows, start: int, stop: int) -> Tensor:
    """Return the rows ``start``..``stop`` of any store as one tensor, a view if they are contiguous."""
    pieces = [piece for _, piece in rows.read(start, stop)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)
