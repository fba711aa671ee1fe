"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


@functools.cache
def _trim() -> Any:
    """Return glibc's malloc_trim, None where there is none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def give_back() -> None:
    """Return freed memory to the system: what is packed lies between steps that are freed, and would keep their pages
    (1.6 GB for a model of 8 billion)."""
    if (trim := _trim()) is not None:
        trim(0)
