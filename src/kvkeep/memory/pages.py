"""Rows in pages: all rows, or the newest within a capacity and a copy of the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvkeep.errors import EntriesLost
from kvkeep.memory.disk_rows import Digests, check_read, checked, lost
from kvkeep.memory.places import Place
from kvkeep.memory.rows import BLOCK, Rows, picked, selected

MAX_PAGE_ROWS = 1024
"""Rows of the largest page of a text of at most 65,536 tokens."""
MIN_UNITS = 8
"""The minimum number of units within the capacity, unless they are of the smallest size."""


class PagedRows(Rows):
    """All rows, in pages that are allocated once and never moved. A page holds the appended rows, or an eighth of the
    rows allocated before, between ``smallest`` and ``largest``. So little memory is unused, and reads are long. Pages
    of more than ``largest`` rows hold a 64th, because each page on disk is a mapping of the process."""

    def __init__(self, home: Place, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> None:
        self.home = home
        self.smallest = smallest
        self.largest = largest
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
    def lends(self) -> bool:  # type: ignore[override]
        """Whether the pages are in files, and take no memory."""
        return self.home.name == "disk"

    def freeze(self, length: int) -> list[Tensor]:
        """Return the whole blocks of the first ``length`` rows as views, several blocks each. From now on they never
        change."""
        stop = length // self.smallest * self.smallest
        self._fixed = max(self._fixed, stop)
        return [rows for _, rows in self.read(0, stop)]

    def next_row(self) -> tuple[Tensor, int] | None:
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

    def passages(self, numbers: Tensor, size: int) -> Tensor:
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
            by_passage = self.pages[number].unflatten(-2, (-1, size))
            found[here] = by_passage[lanes[here], inside[here]]
        return found

    def compare(self, rows: Sequence[int]) -> None:
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


class RecentPages(PagedRows):
    """Pages that together never have more than ``capacity`` rows. Before a page is allocated, the oldest pages are
    freed, and their rows are lost. Only the first ``smallest`` rows stay, as :attr:`beginning`; they are within the
    capacity, too. Rows are lost in units of one size, so which rows are lost depends only on their number, not on
    how they were appended. The rows of one :meth:`append`, and three times ``smallest``, have to fit."""

    def __init__(self, capacity: int, home: Place, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> None:
        super().__init__(home, smallest, largest)
        self.capacity = capacity // smallest * smallest
        self._unit = unit_rows(capacity, smallest, largest)  # a page, or adopted pages that begin and end with it
        self.beginning: PagedRows = PagedRows(home, smallest, smallest)
        """The first rows, once the page that had them was freed."""

    @property
    def _within(self) -> int:
        """The allocated rows of the last unit, if it is not full."""
        return self._allocated % self._unit

    def _page_size(self, missing: int) -> int:
        return self._unit - self._within

    def _make_space(self) -> None:
        if self._within:
            return  # there is space for a unit
        while self._allocated - self.first > self.capacity - self.smallest - self._unit:
            if not self.first:
                self.beginning.append(self.pages[0][..., : self.smallest, :])
                check_read(self.pages[0])
            self.first += self._unit
            while self.starts[0] < self.first:
                del self.pages[0], self.starts[0]
            if self._digests is not None:
                self._digests.keep(self.first, self.length)

    def holds(self, rows: Tensor) -> bool:
        """Return whether ``rows`` can be the next page: they are whole blocks of one unit, and the pages so far are
        full."""
        return self._within + rows.shape[-2] <= self._unit and super().holds(rows)

    def passages(self, numbers: Tensor, size: int) -> Tensor:
        """Return copies of passages as :meth:`PagedRows.passages`: of the newest rows, or of :attr:`beginning`."""
        if not self.first:
            return super().passages(numbers, size)
        found, stop = super().passages(numbers.clamp(min=self.first // size), size), self.beginning.length // size
        first = numbers < stop
        if bool(first.any()):
            where = first.to(found.device)
            found[where] = self.beginning.passages(numbers.clamp(max=stop - 1), size)[where]
        return found

    @property
    def lends(self) -> bool:  # type: ignore[override]
        return super().lends and not self.first

    def select(self, index: Tensor) -> None:
        super().select(index)
        self.beginning.select(index)


def unit_rows(capacity: int, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> int:
    """Return the rows that :class:`RecentPages` loses at once: the largest power of two times ``smallest`` that is at
    most ``largest`` and fits :data:`MIN_UNITS` times, else ``smallest``."""
    unit = smallest
    while 2 * unit <= min(largest, capacity // MIN_UNITS):
        unit *= 2
    return unit


def recent_pages_of(count: int, capacity: int, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> list[int]:
    """Return the rows of each page of :class:`RecentPages`, and of its beginning, after appending ``count`` rows."""
    unit = unit_rows(capacity, smallest, largest)
    pages, limit = -(-count // unit), (capacity // smallest - 1) * smallest // unit
    return [unit] * pages if pages <= limit else [smallest] + [unit] * limit


def pick_each(stores: Sequence[Rows], lane: Tensor, slot: Tensor) -> list[Tensor]:
    """Return the single rows of :meth:`Rows.pick` from each of several stores, whose pages, if they have any, begin
    at the same slots."""
    if not stores[0].pages:
        return [rows.pick(lane, slot) for rows in stores]
    pages, starts = stores[0].pages, stores[0].starts
    lane, slot = lane.to(pages[0].device), slot.to(pages[0].device)
    if len(pages) == 1:
        return [picked(rows.pages[0], lane, slot - starts[0]) for rows in stores]
    found = [rows.pages[0].new_empty(len(slot), rows.pages[0].shape[-1]) for rows in stores]
    number_of = torch.bucketize(slot, torch.tensor(starts[1:], device=slot.device), right=True)
    for number, start in enumerate(starts):
        here = (number_of == number).nonzero().squeeze(1)
        place = lane.index_select(0, here) * pages[number].shape[-2] + slot.index_select(0, here) - start
        for rows, into in zip(stores, found, strict=True):
            into.index_copy_(0, here, rows.pages[number].flatten(0, -2).index_select(0, place))
    return found


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
