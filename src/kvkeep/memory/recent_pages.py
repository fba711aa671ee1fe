"""Pages of the newest rows, within a capacity, and a copy of the first rows."""

from __future__ import annotations

from torch import Tensor

from kvkeep.memory.places import Place
from kvkeep.memory.rows import BLOCK, MAX_PAGE_ROWS, PagedRows

MIN_UNITS = 8
"""The minimum number of units within the capacity, unless they are of the smallest size."""


class RecentPages(PagedRows):
    """Pages that together never have more than ``capacity`` rows. Before a page is allocated, the oldest pages are
    freed, and their rows are lost. Only the first ``smallest`` rows stay, as :attr:`beginning`; they are within the
    capacity, too. Rows are lost in units of one size, so what is lost depends on the number of rows only, and not on
    how they were appended. The rows of one :meth:`append` and of two units have to fit."""

    def __init__(self, capacity: int, home: Place, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> None:
        super().__init__(home, smallest, largest)
        self.capacity = capacity // smallest * smallest
        self._unit = smallest  # rows that are lost at once: a page, or adopted pages that begin and end with them
        while 2 * self._unit <= min(largest, self.capacity // MIN_UNITS):
            self._unit *= 2
        self.beginning = PagedRows(home, smallest, smallest)
        """The first rows, once the page that had them was freed."""

    @property
    def _within(self) -> int:
        """The allocated rows of the last unit, if it is not full."""
        return self._allocated % self._unit

    def _page_size(self, missing: int) -> int:
        return self._unit - self._within

    def _make_space(self, rows: int) -> None:
        if self._within:
            return  # there is space for a unit
        while self._unit < self._allocated - self.first > self.capacity - self.smallest - self._unit:
            if not self.first:
                self.beginning.append(self.pages[0][..., : self.smallest, :])
            self.first += self._unit
            while self.starts[0] < self.first:
                del self.pages[0], self.starts[0]
                self._adopted = max(0, self._adopted - 1)
            self.changes += 1

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
