"""Bytes that a session is granted before it is answered: the most that it can come to hold. A server lets in by them
(:mod:`kvkeep.serve.arbiter`), and ``kvkeep capacity`` counts sessions by them."""

from __future__ import annotations

from typing import Any

from kvkeep.budget import DEFAULT_CHUNK, Budget
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.rows import up
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.sizes import sizes
from kvkeep.stores.readers.draft import VOTERS

BOOKKEEPING = 16
"""Bytes at most of an entry's slot, score and place in a table."""
OF_TOKEN = 9
"""Bytes of a token's id, position, and whether it is padding."""
FLOAT = 4


def grant(
    geometry: ModelGeometry,
    candidate: Candidate,
    budget: int | None,
    tokens: int,
    *,
    shared: bool = True,
    chunk: int | None = None,
    rows: int | None = None,
    model: Any = None,
) -> int:
    """Return the bytes of memory that a cache can come to hold until it has read ``tokens`` tokens, on disk not
    counted: what attention reads, codes, bookkeeping, checkpoints in memory, and what a step takes for a moment: the
    keys and values of a chunk in one layer, recall, and logits. Weights and hidden states are the model's.

    budget: entries of each full layer, all that are set aside for ``static``. shared: whether checkpoints on the host
    are in the same memory. chunk: tokens of a prompt that a cache without a budget reads at once. rows: of which a pass
    gives logits, by default those of the longest round. model: as :func:`~kvkeep.plan.sizes.sizes` takes it.
    """
    parts = [candidate]
    if candidate.method.reading is not None:  # and all of a text until it was read once more
        parts.append(Candidate("window+checkpoint:kv", "kv", candidate.where))
    most = max(_held(geometry, part, budget, tokens, shared, model) for part in parts)
    return most + _step(geometry, candidate, budget, tokens, chunk, rows)


def widest_bytes(geometry: ModelGeometry) -> int:
    """Return the bytes of a token's keys and values in one layer, of that which has the largest."""
    elements = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in geometry.full_layers)
    return elements * geometry.dtype_bytes


def _held(
    geometry: ModelGeometry, candidate: Candidate, budget: int | None, tokens: int, shared: bool, model: Any
) -> int:
    method, layers = candidate.method, geometry.full_layers
    if method.selector.layout == "static":  # all of it from the start
        return (budget or 0) * geometry.full_bytes_per_token
    size = sizes(geometry, candidate, tokens, budget, shared=shared, steps=1, model=model)
    lanes = sum(layer.kv_heads for layer in layers)
    entries = size.exact + size.stored if size.budget is not None else 0
    tables = BOOKKEEPING * lanes * entries + OF_TOKEN * up(tokens + 1)
    if method.recall.drafts:  # queries by which resident entries are chosen anew, and what they gave
        elements = sum(layer.key_dim + layer.value_dim + 1 for layer in layers)
        queries = min(VOTERS, method.selector.observation_window or VOTERS)
        tables += FLOAT * queries * geometry.attention_heads * elements
    return size.memory(shared) + tables


def _step(
    geometry: ModelGeometry, candidate: Candidate, budget: int | None, tokens: int, chunk: int | None, rows: int | None
) -> int:
    """Return the bytes that are a session's own of a packed pass, beside what its cache holds."""
    method = candidate.method
    if rows is None:
        rows = _drafted(geometry, candidate, budget) if method.recall.drafts and budget is not None else 1
    logits = rows * geometry.vocab_size * (geometry.dtype_bytes + 2 * FLOAT)  # as they come, and as they are sampled
    if not candidate.keeps_all:
        return logits  # its chunk is among the sizes
    chunk = min(chunk or DEFAULT_CHUNK, tokens)
    if method.selector.layout != "static":  # and all in one piece, where the first ones are held with others
        chunk += tokens
    return logits + chunk * widest_bytes(geometry)


def _drafted(geometry: ModelGeometry, candidate: Candidate, budget: int) -> int:
    """Return the rows of the longest round: its drafts and the token before them."""
    method = candidate.method
    return min(method.recall.tail(budget), method.chunk(geometry, Budget.parse(budget), budget))
