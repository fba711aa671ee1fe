"""Whether the process can get more memory, asked before a library is called that ends the process without it.

Libraries written in Rust and OpenMP end the process where an allocation fails, and no caller can prevent it then.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path

_M_ARENA_MAX = -8
"""glibc's number of the parameter, in malloc.h."""
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def has_room(nbytes: int) -> bool:
    """Return whether the process can get ``nbytes`` more of memory. It asks the system, which counts address space
    under ``ulimit -v``, then for the memory that the C library has not returned to it. Takes microseconds."""
    try:
        mmap.mmap(-1, max(1, nbytes), **_PRIVATE).close()
    except (OSError, ValueError, OverflowError, MemoryError):
        return _can_malloc(nbytes)
    return True


def _can_malloc(nbytes: int) -> bool:
    try:
        libc = ctypes.CDLL(None)
        malloc, free = libc.malloc, libc.free
        malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
        free.argtypes, free.restype = [ctypes.c_void_p], None
        found = malloc(nbytes)
    except (AttributeError, OSError, TypeError, OverflowError, MemoryError, ctypes.ArgumentError):
        return False
    free(found)
    return found is not None


def address_space_left() -> int | None:
    """Return the bytes of address space that the process may still map (``ulimit -v``); None without a limit."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except (ImportError, AttributeError, OSError, ValueError):  # Windows has no limit, and macOS no such file
        return None
    return max(0, limit - mapped)


def share_heap() -> None:
    """Let all threads allocate from one heap. glibc reserves 64 MB of address space for the heap of each thread, which
    a process with a limit cannot spare. Threads wait for each other a little longer."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
