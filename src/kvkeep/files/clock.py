"""Notices that somebody sets the clock, so that nothing is removed because it seems to be old."""

from __future__ import annotations

import math
import time

JUMP_S = 60.0
"""Seconds between two readings, more than passed, that are a jump of the clock and no correction."""


class ClockWatch:
    """Compares the clock with the time that has passed since the computer was started."""

    def __init__(self) -> None:
        self._difference = time.time() - _passed()
        self._jumped: float | None = None

    def steady_s(self) -> float:
        """Return for how many seconds the clock has not jumped; infinity if it has not since this object was made."""
        difference = time.time() - _passed()
        if abs(difference - self._difference) > JUMP_S:
            self._jumped = _passed()
        self._difference = difference
        return math.inf if self._jumped is None else _passed() - self._jumped


def _passed() -> float:
    """Return seconds that no setting of the clock changes, and that count while the computer sleeps if it can tell."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
