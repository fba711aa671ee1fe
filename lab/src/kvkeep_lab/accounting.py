"""KV-Direct's Eq. 28: bytes by formula, against bytes measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import KeepCache, held_by
from kvkeep.geometry import CheckpointKind, ModelGeometry
from kvkeep.stores.bounded import BoundedLayer
from kvkeep.stores.meter import nbytes

KINDS: tuple[CheckpointKind, ...] = ("kv", "residual", "tokens")


@dataclass(frozen=True)
class Bytes:
    """After ``tokens`` tokens (T) within a budget of ``entries`` (B).

    stock: an unbounded cache's. paper: M(T, B) = B kv + (T - B) d b, one vector for each evicted token (Eq. 28).
    predicted: what this ``kind`` should hold: B entries of the full layers, the sliding layers' windows, and its own
    bytes for T (residuals and ids are written as tokens come) or T - B tokens (entries move when they leave).
    used: the rows really held. allocated: with what lies idle at the end of pages of 256 to 1024 rows.
    bookkeeping: positions, and ids where nothing is rebuilt from them; in none of the other figures.
    """

    kind: str
    tokens: int
    entries: int
    stock: int
    paper: int
    predicted: int
    used: int
    allocated: int
    bookkeeping: int

    @property
    def holds(self) -> bool:
        """To the byte."""
        return self.used == self.predicted <= self.allocated


@torch.no_grad()
def account(
    model: Any,
    ids: Tensor,
    *,
    kinds: Sequence[CheckpointKind] = KINDS,
    lengths: Sequence[int] = (96, 256),
    budgets: Sequence[int] = (0, 64),
) -> Iterator[Bytes]:
    """Let kv-direct read the first tokens of ``ids``, for each checkpoint kind, length and budget, and count."""
    for kind in kinds:
        for entries in budgets:
            for length in lengths:
                cache = KeepCache(model, "kv-direct", entries, checkpoint=kind, where="host")
                tokens = ids[:, :length].to(cache.request.device)
                model(tokens, past_key_values=cache, logits_to_keep=1)
                yield _count(cache, kind, tokens.shape[1], entries)


def _count(cache: KeepCache, kind: CheckpointKind, tokens: int, entries: int) -> Bytes:
    geometry, memory = cache.geometry, cache.memory()
    resident = min(entries, tokens)
    return Bytes(
        kind,
        tokens,
        entries,
        stock=_unbounded(geometry, tokens),
        paper=resident * geometry.kv_bytes_per_token + (tokens - resident) * geometry.residual_bytes_per_token,
        predicted=geometry.sliding_bytes(tokens)
        + resident * geometry.full_bytes_per_token
        + (tokens - resident if kind == "kv" else tokens) * geometry.checkpoint_bytes_per_token(kind),
        used=_used(cache),
        allocated=memory.resident_bytes + sum(memory.checkpoint_bytes.values()),
        bookkeeping=memory.bookkeeping_bytes,
    )


def _unbounded(geometry: ModelGeometry, tokens: int) -> int:
    return tokens * geometry.full_bytes_per_token + geometry.sliding_bytes(tokens)


def _used(cache: KeepCache) -> int:
    """Add up the tensors of all rows held, resident and checkpointed."""
    used = 0
    for layer in cache.layers:
        used += nbytes(*(layer.state().values() if isinstance(layer, BoundedLayer) else held_by(layer)))
    for _, rows in cache.checkpoint_rows():
        used += nbytes(*(piece for _, piece in rows.read(rows.first, rows.length)))
    if cache.checkpoint is not None and cache.checkpoint.reads_ids:
        used += nbytes(cache.ledger.ids.view())
    return used
