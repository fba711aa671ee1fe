"""Pages of the newest rows, within a capacity, and a copy of the first rows."""

from __future__ import annotations

from torch import Tensor

from kvkeep.memory.places import Place
from kvkeep.memory.rows import BLOCK, MAX_PAGE_ROWS, PagedRows

MIN_PAGES = 8
"""The minimum number of pages within the capacity, unless they are of the smallest size."""


class RecentPages(PagedRows):
    """Pages that together never have more than ``capacity`` rows. Before a page is allocated, the oldest pages are
    freed, and their rows are lost. Only the first ``smallest`` rows stay, as :attr:`beginning`; they are within the
    capacity, too. All pages have the same number of rows, so what is lost depends on the number of rows only, and not
    on how they were appended. The rows of one :meth:`append` and of two pages have to fit."""

    def __init__(self, capacity: int, home: Place, smallest: int = BLOCK, largest: int = MAX_PAGE_ROWS) -> None:
        super().__init__(home, smallest, largest)
        self.capacity = capacity // smallest * smallest
        self._size = smallest  # rows of a page
        while 2 * self._size <= min(largest, self.capacity // MIN_PAGES):
            self._size *= 2
        self.beginning = PagedRows(home, smallest, smallest)
        """The first rows, once the page that had them was freed."""

    @property
    def _free(self) -> int:
        """The rows that may be allocated before a page is freed."""
        return self.capacity - self.smallest - (self._allocated - self.first)

    def _page_size(self, missing: int) -> int:
        return self._size

    def _make_space(self, rows: int) -> None:
        while len(self.pages) > 1 and rows > self._free:
            if not self.first:
                self.beginning.append(self.pages[0][..., : self.smallest, :])
            del self.pages[0], self.starts[0]
            self.first = self.starts[0]
            self.changes += 1
            self._adopted = max(0, self._adopted - 1)

    def holds(self, rows: Tensor) -> bool:
        """Return whether ``rows`` can be the next page: they are a page of this store's size, and the pages so far are
        full."""
        return rows.shape[-2] == self._size and super().holds(rows)

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
