"""Pages of the newest rows, within a capacity, and a copy of the first rows."""

from __future__ import annotations

from torch import Tensor

from kvkeep.memory.disk_rows import check_read
from kvkeep.memory.places import Place
from kvkeep.memory.rows import BLOCK, MAX_PAGE_ROWS, PagedRows

MIN_UNITS = 8
"""The minimum number of units within the capacity, unless they are of the smallest size."""


class RecentPages(PagedRows):
    """Pages that together never have more than ``capacity`` rows. Before a page is allocated, the oldest pages are
    freed, and their rows are lost. Only the first ``smallest`` rows stay, as :attr:`beginning`; they are within the
    capacity, too. Rows are lost in units of one size, so what is lost depends on the number of rows only, and not on
    how they were appended. The rows of one :meth:`append`, and three times ``smallest``, have to fit."""

    def __init__(self, capacity: int, home: Place, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> None:
        super().__init__(home, smallest, largest)
        self.capacity = capacity // smallest * smallest
        self._unit = unit_rows(capacity, smallest, largest)  # a page, or adopted pages that begin and end with it
        self.beginning = PagedRows(home, smallest, smallest)
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

    def blocks(self, numbers: Tensor, size: int) -> Tensor:
        """Return copies of blocks as :meth:`PagedRows.blocks`: of the newest rows, or of :attr:`beginning`."""
        if not self.first:
            return super().blocks(numbers, size)
        found, stop = super().blocks(numbers.clamp(min=self.first // size), size), self.beginning.length // size
        first = numbers < stop
        if bool(first.any()):
            where = first.to(found.device)
            found[where] = self.beginning.blocks(numbers.clamp(max=stop - 1), size)[where]
        return found

    @property
    def lends(self) -> bool:
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
