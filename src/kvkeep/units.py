"""Numbers as a person reads them."""

from __future__ import annotations


def size(count: int, *, up: bool = False) -> str:
    """Return bytes with a unit (MB is 10**6). up: never less than ``count``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= scale:
            return f"{-(-10 * count // scale) / 10 if up else count / scale:.1f} {unit}"
    return f"{count} B"
