"""The promise of memory: what all sessions hold together is within the total, at every step.

Budgets are hard, so the most that a session can ever hold while it answers is known before it begins. An answer begins
only once that much is granted, and keeps it until it ends; what is idle counts with what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvkeep.cache import KeepCache
from kvkeep.errors import BudgetError
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.sizes import sizes

MEGA = 1e6
BOOKKEEPING = 16
"""Bytes at most of an entry's slot, score and place in a table."""


def most(cache: KeepCache, tokens: int) -> int:
    """Return the bytes of memory that ``cache`` can hold at most until it has read ``tokens`` tokens, on disk not
    counted: what attention reads, codes, bookkeeping, checkpoints in memory, and what a step takes for a moment."""
    where = None if cache.spec is None else cache.spec.where
    kind = None if cache.spec is None else str(cache.spec)
    candidates = [Candidate(cache.method.name, kind, where)]
    if cache.method.reading is not None:  # and all of a text until it was read once more
        candidates.append(Candidate("window+checkpoint:kv", "kv", where))
    return max(_most(cache, candidate, tokens) for candidate in candidates)


def _most(cache: KeepCache, candidate: Candidate, tokens: int) -> int:
    size = sizes(cache.geometry, candidate, tokens, cache.entries, steps=1, model=cache.model)
    entries = size.exact + size.stored if size.budget is not None else 0
    lanes = sum(layer.kv_heads for layer in cache.geometry.full_layers)
    return size.memory(shared=True) + BOOKKEEPING * lanes * entries


def held(cache: KeepCache) -> int:
    """Return the bytes of memory that a cache holds now, on disk not counted."""
    memory = cache.memory()
    checkpoints = memory.checkpoint_bytes["device"] + memory.checkpoint_bytes["host"]
    return memory.resident_bytes + memory.compressed_bytes + memory.bookkeeping_bytes + checkpoints


@dataclass
class Arbiter:
    """Grants memory within ``total`` bytes. granted: what running answers may hold; idle: what other sessions hold."""

    total: int

    def check(self, wanted: int) -> None:
        """Raise BudgetError if so many bytes will never be there."""
        if wanted > self.total:
            raise BudgetError(
                f"The session can come to hold {wanted / MEGA:.1f} MB and all sessions together have "
                f"{self.total / MEGA:.1f} MB; give it a smaller budget or fewer tokens, or the server more memory."
            )

    def short(self, wanted: int, granted: Iterable[int], idle: Iterable[int]) -> int:
        """Return how many bytes are missing for ``wanted`` more; 0 or less: it can be granted."""
        return wanted + sum(granted) + sum(idle) - self.total
