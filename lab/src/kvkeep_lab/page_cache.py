"""Mapped files without a name, and their pages in the page cache.

Checkpoints on disk are such files (:class:`kvkeep.memory.places.Disk`). Reads are fast while the page cache holds them;
dropped pages are read from the disk again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import KvkeepError

_PAGEOUT = 21  # MADV_PAGEOUT, of Linux 5.4
_SYNC = 4  # MS_SYNC; an unwritten page cannot be dropped
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+s \S+ \S+ \d+ +(/.*) \(deleted\)")


@dataclass(frozen=True)
class Mapped:
    """A mapped file without a name: its address and its size in bytes, a multiple of the page size."""

    address: int
    size: int

    def drop(self) -> None:
        """Write its pages, and drop them from memory. Raises KvkeepError if the system does not support it."""
        self._call("msync", _SYNC)
        self._call("madvise", _PAGEOUT)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the file in memory, in this process or in the page cache."""
        pages = (ctypes.c_ubyte * (self.size // mmap.PAGESIZE))()
        self._call("mincore", pages)
        return mmap.PAGESIZE * sum(page & 1 for page in bytes(pages))

    def _call(self, name: str, argument: object) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if getattr(library, name)(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), argument):
            reason = os.strerror(ctypes.get_errno()).lower()
            raise KvkeepError(f"Pages of files cannot be dropped from memory here: {name} says {reason}.")


def mapped_below(folder: Path) -> list[Mapped]:
    """Return the files without a name that this process has mapped and that were created in ``folder``. Raises
    KvkeepError if the system does not report mapped files."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise KvkeepError("What a process has mapped is known on Linux only; measure there.") from error
    found, inside = [], folder.resolve()
    for line in lines:
        if (match := _LINE.fullmatch(line)) and Path(match[3]).parent == inside:
            begin, end = int(match[1], 16), int(match[2], 16)
            found.append(Mapped(begin, end - begin))
    return found
