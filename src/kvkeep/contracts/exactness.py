"""What a method promises about its output."""

from __future__ import annotations

from enum import StrEnum


class Exactness(StrEnum):
    """What a method promises about its output."""

    EXACT = "exact"  # the same tokens as with the unbounded cache
    REVERSIBLE = "reversible"  # evicted entries can come back, approximately
    LOSSY = "lossy"  # evicted entries are lost or changed
