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
from kvkeep.native.structures import address_of, rows


class Digests:
    """Digests of the whole blocks of ``rows`` rows in pages (lanes, n, width), by the first row of the page."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._known: dict[int, Tensor] = {}  # (lanes, blocks) int64

    def add(self, pages: Sequence[Tensor], starts: Sequence[int], length: int) -> None:
        """Make the digests of the blocks that were completed since the last call. length: the end of the rows."""
        for start, page in zip(reversed(starts), reversed(pages), strict=True):  # the last ones change
            count = min(length - start, page.shape[1]) // self.rows
            known = self._known.get(start)
            first = 0 if known is None else known.shape[1]
            if first < count:
                made = _digests(page, first, count - first, self.rows)
                self._known[start] = made if known is None else torch.cat([known, made], 1)
            elif known is not None:
                break

    def keep(self, first: int, stop: int) -> None:
        """Forget all digests but those of whole blocks within the rows ``first`` to ``stop``, where a page begins."""
        kept = {start: (stop - start) // self.rows for start in self._known if first <= start < stop}
        self._known = {start: self._known[start][:, :count] for start, count in kept.items() if count}

    def differ(self, pages: Sequence[Tensor], starts: Sequence[int], rows: Sequence[int] | None = None) -> bool:
        """Return whether the bytes of blocks have changed: those of all pages, or of the pages with ``rows``."""
        for start, page in zip(starts, pages, strict=True):
            known = self._known.get(start)
            if known is None or (rows is not None and not any(start <= row < start + page.shape[1] for row in rows)):
                continue
            if not torch.equal(_digests(page, 0, known.shape[1], self.rows), known):
                return True
        return False


def _digests(page: Tensor, first: int, count: int, block: int) -> Tensor:
    """Return the digests of ``count`` blocks of ``block`` rows of a page (lanes, n, width) from block ``first`` on,
    (lanes, count)."""
    found, described = torch.empty(len(page), count, dtype=torch.int64), rows(page)
    library.kernels().kvkeep_digests(address_of(described), first, count, block, found)
    return found


def lost(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether one of ``tensors`` is of a file on disk that could not be read."""
    return any(tensor is not None and library.is_lost(tensor.data_ptr()) for tensor in tensors)


def check_read(*tensors: Tensor | None) -> None:
    """Raise EntriesLost if one of ``tensors``, which were just copied and may be freed now, could not be read."""
    if library.lost_files() and lost(tensors):
        raise EntriesLost


class DiskRows(Protocol):
    """Rows that may lie on disk."""

    def damaged(self, compare: bool) -> bool:
        """Return whether rows could not be read; with ``compare``, or differ from what was written."""


class DiskChecks:
    """The checks of one cache. rows: returns the rows that it has on disk."""

    def __init__(self, rows: Callable[[], Iterable[DiskRows]]) -> None:
        self._rows = rows
        self._seen = library.lost_files()
        self._lost = False

    def check(self, compare: bool = False) -> None:
        """Raise EntriesLost if rows could not be read; with ``compare``, or differ from what was written. Once
        raised, it is raised by every later call."""
        files = library.lost_files()
        if (compare or files != self._seen) and not self._lost:
            self._lost = any(rows.damaged(compare) for rows in self._rows())
            self._seen = files
        if self._lost:
            raise EntriesLost


def checked(home: Any) -> bool:
    """Return whether rows of a place are checked: they are on disk, and there is the native library."""
    return home is not None and home.name == "disk" and library.library() is not None
