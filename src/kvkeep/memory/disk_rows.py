"""Rows on disk are checked: whether their files could be read, and whether they are still what was written.

The native library notes a mapped file that the disk refuses to read (:func:`kvkeep.native.library.map_file`). Of what a
disk returns without an error, digests tell: each whole block of rows has one, made when the block is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.errors import EntriesLost
from kvkeep.native import library

LOST = (
    "The disk does not return what was written to it, so entries of the text are lost, and the text has to be read "
    "again. Check the disk, or keep the entries in memory (--where host)."
)


class Digests:
    """Digests of the first whole blocks of ``rows`` rows, of tensors (lanes, n, width) one after the other."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._known: dict[int, Tensor] = {}

    def add(self, pages: Sequence[Tensor], starts: Sequence[int], length: int) -> None:
        """Make those of blocks that are now complete. starts: the first row of each page; length: the end of the
        rows."""
        for start, page in zip(starts, pages, strict=True):
            stop = min(length, start + page.shape[1]) // self.rows
            missing = [number for number in range(start // self.rows, stop) if number not in self._known]
            if missing:  # the last ones: blocks are completed in order
                made = _digests(page, missing[0] - start // self.rows, len(missing), self.rows)
                self._known.update(zip(missing, made.unbind(1), strict=True))

    def keep(self, first: int, stop: int) -> None:
        """Forget all but those of the blocks within the rows ``first`` to ``stop``."""
        numbers = range(first // self.rows, stop // self.rows)
        self._known = {number: one for number, one in self._known.items() if number in numbers}

    def differ(self, pages: Sequence[Tensor], starts: Sequence[int], numbers: Iterable[int] | None = None) -> bool:
        """Return whether blocks have other bytes than they had: all of them, or those of ``numbers``."""
        wanted = None if numbers is None else {*numbers}
        for start, page in zip(starts, pages, strict=True):
            own = range(start // self.rows, (start + page.shape[1]) // self.rows)
            known = [number for number in own if number in self._known and (wanted is None or number in wanted)]
            if not known:
                continue
            low, stop = known[0], known[-1] + 1
            found = _digests(page, low - own.start, stop - low, self.rows)
            picked = found[:, [number - low for number in known]]
            if not torch.equal(picked, torch.stack([self._known[number] for number in known], 1)):
                return True
        return False


def _digests(page: Tensor, first: int, count: int, rows: int) -> Tensor:
    """Return the digests of ``count`` blocks of a page (lanes, n, width) from block ``first`` on, (lanes, count)."""
    lanes, size = page.shape[0], page.itemsize
    block = rows * page.stride(1) * size
    found = torch.empty(lanes, count, dtype=torch.int64)
    library.kernels().kvkeep_digests(
        page.data_ptr() + first * block, lanes, page.stride(0) * size, count, block, found.data_ptr()
    )
    return found


def lost(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether one of ``tensors`` is of a file on disk that could not be read."""
    return any(tensor is not None and library.is_lost(tensor.data_ptr()) for tensor in tensors)


class Checked(Protocol):
    """Rows that may lie on disk."""

    def damaged(self, compare: bool) -> bool:
        """Return whether rows could not be read; with ``compare``, or have other bytes than were written."""


class DiskChecks:
    """The checks of one cache. rows: returns the rows that it has on disk."""

    def __init__(self, rows: Callable[[], Iterable[Checked]]) -> None:
        self._rows = rows
        self._seen = library.lost_files()
        self._lost = False

    def check(self, compare: bool = False) -> None:
        """Raise EntriesLost if rows could not be read; with ``compare``, or have other bytes than were written. It is
        then raised always."""
        files = library.lost_files()
        if (compare or files != self._seen) and not self._lost:
            self._seen = files
            self._lost = any(rows.damaged(compare) for rows in self._rows())
        if self._lost:
            raise EntriesLost(LOST)


def checked(home: Any) -> bool:
    """Return whether rows of a place are checked: they are on disk, and there is the native library."""
    return home is not None and home.name == "disk" and library.library() is not None
