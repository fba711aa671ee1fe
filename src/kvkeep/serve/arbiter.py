"""The memory limit. All sessions together stay within it at every step.

Budgets are hard, so the peak of a session is known before its answer begins. An answer begins when its peak is granted,
and keeps the grant until it ends. An idle session counts with its current bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvkeep.cache import KeepCache
from kvkeep.engine.answer import chunk_size
from kvkeep.errors import BudgetError
from kvkeep.plan.sizes import grant
from kvkeep.stores.dynamic import DynamicLayer

MEGA = 1e6
KINDS = ("resident", "compressed", "bookkeeping", "checkpoint_device", "checkpoint_host", "checkpoint_disk")
"""The kinds of bytes of a cache. Bytes on disk are not memory."""


def peak_bytes(cache: KeepCache, tokens: int) -> int:
    """Return the peak bytes of memory of ``cache`` until it has read ``tokens`` tokens
    (:func:`~kvkeep.plan.sizes.grant`)."""
    return grant(
        cache.geometry,
        cache.method,
        cache.entries,
        tokens,
        cache.spec,
        chunk=chunk_size(cache),
        rows=1 if cache.round is None else min(cache.round.tail, cache.stream.chunk),
        model=cache.model,
    )


def restore_bytes(cache: KeepCache, state: int, entries: int) -> int:
    """Return the bytes that filling ``cache``, which is empty, from the store takes: ``state`` bytes of its own and
    ``entries`` bytes of blocks. The tensors of one layer count twice."""
    disk = cache.spec is not None and cache.spec.where == "disk"
    layers = max(1, len(cache.geometry.full_layers))
    return state + (0 if disk else entries) + -(-(state + entries) // layers)


def shared_parts(cache: KeepCache) -> dict[int, int]:
    """Return the bytes of each part that other caches may share, by address."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    parts = [tensor.untyped_storage() for layer in layers for tensor in layer.shared]
    return {part.data_ptr(): part.nbytes() for part in parts}


SessionBytes = tuple[int, Mapping[int, int]]
"""The bytes of a session, and the shared parts among them by address."""


def total_bytes(sessions: Iterable[SessionBytes]) -> int:
    """Return the bytes of some sessions. A part that several of them share counts once."""
    used, parts = 0, dict[int, int]()
    for total, shared in sessions:
        used += total - sum(shared.values())
        parts |= shared
    return used + sum(parts.values())


@dataclass
class Arbiter:
    """Grants memory within ``total`` bytes."""

    total: int

    def check(self, wanted: int) -> None:
        """Raise BudgetError if ``wanted`` bytes exceed the total."""
        if wanted > self.total:
            raise BudgetError(
                f"The request needs up to {wanted / MEGA:.1f} MB of cache, and the server has {self.total / MEGA:.1f} "
                "MB for all sessions; use a smaller budget or fewer tokens, or start the server with more --memory."
            )

    def fitting(self, cache: KeepCache, tokens: int) -> int:
        """Return the number of sessions like ``cache``, with ``tokens`` tokens, that can be answered at the same
        time."""
        return self.total // peak_bytes(cache, tokens)

    def grants(self, wanted: int, others: Iterable[SessionBytes]) -> bool:
        """Return whether ``wanted`` more bytes fit beside ``others``."""
        return wanted + total_bytes(others) <= self.total


def bytes_by_kind(cache: KeepCache) -> dict[str, int]:
    """Return the bytes of a cache by kind."""
    found = cache.memory()
    places = (found.checkpoint_bytes[place] for place in ("device", "host", "disk"))
    counts = (found.resident_bytes, found.compressed_bytes, found.bookkeeping_bytes, *places)
    return dict(zip(KINDS, counts, strict=True))
