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
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.rows import up
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.sizes import sizes
from kvkeep.serve.batch import chunk_of
from kvkeep.stores.draft import VOTERS
from kvkeep.stores.dynamic import DynamicLayer

MEGA = 1e6
BOOKKEEPING = 16
"""Bytes at most of an entry's slot, score and place in a table."""
OF_TOKEN = 9
"""Bytes of a token's id, position, and whether it is padding."""
FLOAT = 4


def most(cache: KeepCache, tokens: int) -> int:
    """Return the bytes of memory that ``cache`` can come to hold until it has read ``tokens`` tokens, on disk not
    counted: what attention reads, codes, bookkeeping, checkpoints in memory, and what a step takes for a moment: the
    keys and values of a chunk in one layer, recall, and logits. Weights and hidden states are the model's."""
    where = None if cache.spec is None else cache.spec.where
    kind = None if cache.spec is None else str(cache.spec)
    candidates = [Candidate(cache.method.name, kind, where)]
    if cache.method.reading is not None:  # and all of a text until it was read once more
        candidates.append(Candidate("window+checkpoint:kv", "kv", where))
    return max(_most(cache, candidate, tokens) for candidate in candidates) + _step(cache, tokens)


def _most(cache: KeepCache, candidate: Candidate, tokens: int) -> int:
    method, layers = candidate.method, cache.geometry.full_layers
    if method.selector.layout == "static":  # all of it from the start
        return (cache.entries or 0) * cache.geometry.full_bytes_per_token
    size = sizes(cache.geometry, candidate, tokens, cache.entries, steps=1, model=cache.model)
    lanes = sum(layer.kv_heads for layer in layers)
    entries = size.exact + size.stored if size.budget is not None else 0
    tables = BOOKKEEPING * lanes * entries + OF_TOKEN * up(tokens + 1)
    if method.checkpoints and not method.recall.backed:  # which entries each lane has lost
        tables += FLOAT * lanes * up(tokens + 1)
    if method.recall.drafts:  # queries by which resident entries are chosen anew, and what they gave
        elements = sum(layer.key_dim + layer.value_dim + 1 for layer in layers)
        queries = min(VOTERS, method.selector.observation_window or VOTERS)
        tables += FLOAT * queries * cache.geometry.attention_heads * elements
    return size.memory(shared=True) + tables


def _step(cache: KeepCache, tokens: int) -> int:
    """Return the bytes that are a session's own of a packed pass, beside what its cache holds."""
    geometry = cache.geometry
    runs = 1 if cache.round is None else min(cache.round.tail, cache.stream.chunk)
    logits = runs * geometry.vocab_size * (geometry.dtype_bytes + 2 * FLOAT)  # as they come, and as they are sampled
    if not cache.method.selector.keeps_all:
        return logits  # its chunk is among the sizes
    chunk, widest = min(chunk_of(cache), tokens), widest_bytes(geometry)
    if cache.method.selector.layout != "static":  # and all in one piece, where the first ones are held with others
        chunk += tokens
    return logits + chunk * widest


def widest_bytes(geometry: ModelGeometry) -> int:
    """Return the bytes of a token's keys and values in one layer, of that which has the largest."""
    elements = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in geometry.full_layers)
    return elements * geometry.dtype_bytes


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
                f"The session can come to hold {wanted / MEGA:.1f} MB and all sessions together have "
                f"{self.total / MEGA:.1f} MB; give it a smaller budget or fewer tokens, or the server more memory."
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
