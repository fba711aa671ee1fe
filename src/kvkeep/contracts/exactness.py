"""What a method promises about its output."""

from __future__ import annotations

from enum import StrEnum


class Exactness(StrEnum):
    """What a method promises about its output."""

    EXACT = "exact"  # token for token the unbounded cache's
    REVERSIBLE = "reversible"  # evicted entries can come back, approximately
    LOSSY = "lossy"  # evicted entries are discarded
