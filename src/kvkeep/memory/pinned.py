"""Keys and values in pinned host memory, which a GPU copies while it computes.

torch rounds the bytes of a pinned tensor up to a power of two. So a page here has a power of two of bytes, and as many
rows as fit: less than a row is unused. (Pages that are registered with CUDA by hand could have any size. But torch's
allocator knows when the last copy from a page has ended, and keeps a freed page until then.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from kvkeep.memory.rows import BLOCK, Rows


class PinnedRows:
    """Keys and values of one layer, in pages (rows, lanes, key_dim + value_dim): a range of rows within a page is one
    copy. A page has at most an eighth of the rows allocated before, or the appended rows, if these are more.

    wait: waits until all copies between these rows and the device have ended.
    """

    def __init__(self, key_dim: int, value_dim: int, wait: Callable[[], None]) -> None:
        self.width, self.wait = key_dim + value_dim, wait
        self.keys, self.values = _Columns(self, 0, key_dim), _Columns(self, key_dim, value_dim)
        self.pages: list[Tensor] = []

    @property
    def length(self) -> int:
        """The number of rows."""
        return min(self.keys.length, self.values.length)

    @property
    def lanes(self) -> int:
        """Lanes of the rows; 0 before the first one."""
        return self.pages[0].shape[1] if self.pages else 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(page.untyped_storage().nbytes() for page in self.pages)

    def reserve(self, stop: int, lanes: int, dtype: torch.dtype) -> None:
        """Allocate pages until they have ``stop`` rows."""
        allocated = sum(map(len, self.pages))
        while allocated < stop:
            row_bytes = lanes * self.width * dtype.itemsize
            rows, size = page_of(stop - allocated, allocated, row_bytes)
            with torch.inference_mode(False):  # tensors created in it are read-only outside
                page = torch.empty(size // dtype.itemsize, dtype=dtype, pin_memory=True)
            self.pages.append(page[: rows * lanes * self.width].view(rows, lanes, self.width))
            allocated += rows

    def extend(self, count: int) -> None:
        """Count ``count`` more rows, which were written to their places."""
        self.keys.length += count
        self.values.length += count

    def places(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows ``start`` to ``stop`` in order: (row, (n, lanes, width)), each a view of one page."""
        first = 0
        for page in self.pages:
            low, high = max(start, first), min(stop, first + len(page))
            if low < high:
                yield low, page[low - first : high - first]
            first += len(page)

    def truncate(self, length: int) -> None:
        """Remove the rows from ``length`` on."""
        self.keys.truncate(length)
        self.values.truncate(length)

    def trim(self) -> None:
        """Free the pages without rows."""
        needed, allocated = max(self.keys.length, self.values.length), sum(map(len, self.pages))
        while self.pages and allocated - len(self.pages[-1]) >= needed:
            allocated -= len(self.pages.pop())

    def select(self, index: Tensor) -> None:
        """Replace the lanes by those of ``index`` (repeats and reorders allowed)."""
        self.wait()
        before, start = self.pages, 0
        if len(index) != self.lanes:
            self.pages = []
        for page in before:
            picked = page.index_select(1, index.to(page.device))[: self.length - start]
            self.reserve(start + len(picked), len(index), page.dtype)
            for row, place in self.places(start, start + len(picked)):
                place.copy_(picked[row - start : row - start + len(place)])
            start += len(picked)

    def pick(self, lane: Tensor, slot: Tensor) -> Tensor:
        """Return copies of single rows, (n, width), in host memory. lane, slot: (n,)."""
        self.wait()
        (lane, slot), start = torch.stack([lane, slot]).cpu(), 0
        found = torch.empty(len(slot), self.width, dtype=self.pages[0].dtype)
        for page in self.pages:
            here = ((slot >= start) & (slot < start + len(page))).nonzero().squeeze(1)
            found[here] = page[slot[here] - start, lane[here]]
            start += len(page)
        return found


class _Columns(Rows):
    """The keys, or the values, as rows (lanes, **rows**, dim)."""

    def __init__(self, both: PinnedRows, first: int, width: int) -> None:
        self._both, self._columns, self.width = both, slice(first, first + width), width

    def append(self, rows: Tensor) -> None:
        self._both.wait()
        stop = self.length + rows.shape[1]
        self._both.reserve(stop, len(rows), rows.dtype)
        start, self.length = self.length, stop
        for slot, place in self.read(start, stop):
            place.copy_(rows[:, slot - start : slot - start + place.shape[1]])

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        self._both.wait()
        for slot, place in self._both.places(start, stop):
            yield slot, place[..., self._columns].transpose(0, 1)

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.length = length
            self._both.trim()

    @property
    def nbytes(self) -> int:
        return sum(page[..., self._columns].nbytes for page in self._both.pages)


def page_of(missing: int, allocated: int, row_bytes: int) -> tuple[int, int]:
    """Return the rows of the next page, and its bytes. allocated: rows of the pages before; missing: rows to append."""
    wanted = max(missing, allocated // 8, BLOCK) * row_bytes
    size = 1 << (wanted.bit_length() - 1)
    return size // row_bytes, size


def pinned_bytes(counts: Iterable[int], row_bytes: int) -> int:
    """Return the bytes of all pages after appending ``counts`` rows."""
    needed = allocated = total = 0
    for count in counts:
        needed += count
        while allocated < needed:
            rows, size = page_of(needed - allocated, allocated, row_bytes)
            allocated, total = allocated + rows, total + size
    return total
