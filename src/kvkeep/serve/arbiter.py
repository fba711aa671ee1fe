"""The promise of memory: what all sessions hold together is within the total, at every step.

Budgets are hard, so the most that a session can ever hold while it answers is known before it begins. An answer begins
only once that much is granted, and keeps it until it ends; what is idle counts with what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvkeep import report
from kvkeep.cache import KeepCache
from kvkeep.decode.session_file import SessionFile
from kvkeep.errors import BudgetError
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.grant import grant
from kvkeep.serve.batch import chunk_of
from kvkeep.stores.dynamic import DynamicLayer

MEGA = 1e6


def most(cache: KeepCache, tokens: int) -> int:
    """Return the bytes of memory that ``cache`` can come to hold until it has read ``tokens`` tokens
    (:func:`~kvkeep.plan.grant.grant`)."""
    where = None if cache.spec is None else cache.spec.where
    kind = None if cache.spec is None else str(cache.spec)
    return grant(
        cache.geometry,
        Candidate(cache.method.name, kind, where),
        cache.entries,
        tokens,
        chunk=chunk_of(cache),
        rows=1 if cache.round is None else min(cache.round.tail, cache.stream.chunk),
        model=cache.model,
    )


def restoring(file: SessionFile, cache: KeepCache) -> int:
    """Return the bytes that restoring a session takes, tensors of the one layer in hand counted twice. cache: an empty
    one of its kind."""
    disk = cache.spec is not None and cache.spec.where == "disk"
    lasting, hands = 0, dict[str, int]()
    for name, one in file.stored.items():
        size = one.rows * one.row_bytes
        hand = name if name.startswith("checkpoint.") else ".".join(name.split(".")[:2])
        hands[hand] = hands.get(hand, 0) + size
        lasting += 0 if disk and name.startswith("checkpoint.") else size
    return lasting + max(hands.values(), default=0)


def held(cache: KeepCache) -> int:
    """Return the bytes of memory that a cache holds now, on disk not counted."""
    memory = report.memory(cache.made, cache.held)
    checkpoints = memory.checkpoint_bytes["device"] + memory.checkpoint_bytes["host"]
    return memory.resident_bytes + memory.compressed_bytes + memory.bookkeeping_bytes + checkpoints


def shared(cache: KeepCache) -> dict[int, int]:
    """Return the bytes of what other caches may hold, too, by where it is."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    parts = [tensor.untyped_storage() for layer in layers for tensor in layer.shared]
    return {part.data_ptr(): part.nbytes() for part in parts}


@dataclass
class Arbiter:
    """Grants memory within ``total`` bytes."""

    total: int

    def check(self, wanted: int) -> None:
        """Raise BudgetError if so many bytes will never be there."""
        if wanted > self.total:
            raise BudgetError(
                f"The request needs up to {wanted / MEGA:.1f} MB of cache, and the server has {self.total / MEGA:.1f} "
                "MB for all sessions; use a smaller budget or fewer tokens, or start the server with more --memory."
            )

    def fitting(self, cache: KeepCache, tokens: int) -> int:
        """Return how many sessions like ``cache``, of ``tokens`` tokens, can be answered at once."""
        return self.total // most(cache, tokens)

    def grants(self, wanted: int, others: Iterable[tuple[int, Mapping[int, int]]]) -> bool:
        """Return whether there are ``wanted`` bytes more beside ``others``: of each, what it holds or may come to hold,
        and the parts of that which several may hold, by where they are."""
        held, parts = wanted, dict[int, int]()
        for total, own in others:
            held += total - sum(own.values())
            parts |= own
        return held + sum(parts.values()) <= self.total
