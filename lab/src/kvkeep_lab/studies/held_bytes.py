"""``held-bytes``: compares predicted bytes (KV-Direct's Eq. 28) with measured bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field

from kvkeep.cache import KeepCache
from kvkeep.geometry import TOKEN_ID_BYTES
from kvkeep.memory.meter import nbytes
from kvkeep_lab.prompts import built_in
from kvkeep_lab.shapes import CheckpointKind
from kvkeep_lab.studies.base import Count, Study, Trial
from kvkeep_lab.tables import Table


@dataclass(frozen=True)
class Bytes:
    """Bytes after ``tokens`` tokens (T) within a budget of ``entries`` (B)."""

    kind: str
    tokens: int
    entries: int
    stock: int
    """Bytes of an unbounded cache."""
    paper: int
    """M(T, B) = B kv + (T - B) d b, with one vector for each evicted token (Eq. 28)."""
    predicted: int
    """Predicted bytes of ``kind``: B entries of the full layers, the windows of the sliding layers, and checkpoints.
    Residuals and ids are written when tokens arrive, so there are T of them. Entries move when they are evicted, so
    there are T - B of them."""
    used: int
    """Bytes of the stored rows."""
    allocated: int
    """Bytes including unused rows at the end of pages of 256 to 1024 rows."""
    bookkeeping: int
    """Bytes of positions, and of ids unless entries are rebuilt from ids; not included in the other figures."""

    @property
    def holds(self) -> bool:
        """Whether prediction and measurement are equal to the byte."""
        return self.used == self.predicted <= self.allocated


@dataclass(frozen=True)
class HeldBytes:
    """The measurements by kind, budget and length."""

    rows: list[Bytes]


class HeldBytesStudy(Study):
    """KV-Direct's Eq. 28, and its counterpart for every kind of checkpoint."""

    name = "held-bytes"
    about = "compare the bytes that kv-direct holds after T tokens within B entries with the formula"
    protocol = (
        "kv-direct reads the first tokens of the built-in text within each budget, for each kind of checkpoint. "
        "The bytes of all rows that it holds are added up. Predicted: B entries, and what the kind keeps for T - "
        "B (kv) or all T tokens (residual: a vector for each full layer; tokens: an id). Allocated: in pages of "
        "256 to 1024 rows."
    )
    found = HeldBytes

    kinds: list[CheckpointKind] = Field(["kv", "residual", "tokens"], min_length=1, description="kinds of checkpoints")
    lengths: list[Count] = Field([96, 256], min_length=1, description="T")
    budgets: list[int] = Field([0, 64], min_length=1, description="B")

    @torch.no_grad()
    def measure(self, trial: Trial) -> HeldBytes:
        """Read a text and count bytes. Raises UnsupportedModelError if the family does not support a kind."""
        ids = built_in(trial.tokenizer, max(self.lengths)).to(trial.model.device)
        settings = [(kind, budget, length) for kind in self.kinds for budget in self.budgets for length in self.lengths]
        rows: list[Bytes] = []
        for kind, budget, length in settings:
            trial.progress(f"{length} tokens, {kind}", len(rows), len(settings))
            cache = KeepCache(trial.model, "kv-direct", budget, checkpoint=kind, where="host")
            trial.model(ids[:, :length], cache=cache, logits_to_keep=1)
            rows.append(_count(cache, kind, length, budget))
        return HeldBytes(rows)

    def tables(self, found: HeldBytes) -> list[Table]:
        table = Table(
            "Bytes held after T tokens within B entries (Eq. 28: one vector an evicted token)",
            ["kind", "T", "B", "stock cache", "Eq. 28", "predicted", "used", "allocated", "used = predicted"],
        )
        for row in found.rows:
            sizes = (row.tokens, row.entries, row.stock, row.paper, row.predicted, row.used, row.allocated)
            table.rows.append([row.kind, *(f"{size:,}" for size in sizes), "yes" if row.holds else "**no**"])
        return [table]


def _count(cache: KeepCache, kind: CheckpointKind, tokens: int, entries: int) -> Bytes:
    geometry, memory = cache.geometry, cache.memory()
    resident, layers = min(entries, tokens), geometry.sliding_layers
    elements = sum(one.entry_elements * min(tokens, one.window - 1) for one in layers if one.window)
    sliding = elements * geometry.dtype_bytes  # without the rows that a layer has for further entries
    checkpointed = tokens - resident if kind == "kv" else tokens
    of_kind = {
        "kv": geometry.full_bytes_per_token,
        "residual": geometry.residual_checkpoint_bytes_per_token(),
        "tokens": TOKEN_ID_BYTES,
    }
    return Bytes(
        kind,
        tokens,
        entries,
        stock=tokens * geometry.full_bytes_per_token + sliding,
        paper=resident * geometry.kv_bytes_per_token + (tokens - resident) * geometry.residual_bytes_per_token,
        predicted=sliding + resident * geometry.full_bytes_per_token + checkpointed * of_kind[kind],
        used=_used(cache),
        allocated=memory.resident_bytes + sum(memory.checkpoint_bytes.values()),
        bookkeeping=memory.bookkeeping_bytes,
    )


def _used(cache: KeepCache) -> int:
    """Return the bytes of all stored rows, resident and checkpointed."""
    used = 0
    for state in cache.holdings:
        used += nbytes(*(tensor for tensor in state.state().values() if tensor.is_floating_point()))
    for _, rows in cache.checkpoint_rows():
        used += nbytes(*(piece for _, piece in rows.read(rows.first, rows.length)))
    if cache.checkpoint is not None and cache.checkpoint.reads_ids:
        used += nbytes(cache.ledger.ids.view())
    return used
