"""What a text is worth that may be read again: the tokens that it saves, times how often it was used. On disk, blocks
count instead of tokens.

A use counts half after :data:`HALF_LIFE_S` seconds, so that conversations that have ended leave. Instead of a value and
its time, one number is kept: how long until the value has fallen to one. The order of these times is that of the
values, whatever the time is, and a long text that was used often stays before a short one that was used once.
"""

from __future__ import annotations

import math

HALF_LIFE_S = 7200.0
"""Seconds after which a use counts half."""
MAX_HALVINGS = 64
"""What a value can at most be, as a power of two: a clock that was set back makes no value endless."""


def seconds_left(saved: float, left: float = -math.inf) -> float:
    """Return the seconds until the value of a text that is used now falls to one. saved: what this use saves, in tokens
    or blocks; left: the seconds that were left before it."""
    return HALF_LIFE_S * math.log2(saved + 2 ** min(left / HALF_LIFE_S, MAX_HALVINGS))


def part_left(left: float, part: float) -> float:
    """Return the seconds that are left to a part of a text that has ``left``. part: its share of the tokens, above
    0."""
    return left + HALF_LIFE_S * math.log2(part)
