"""Reports: what a cache holds, and what each of its layers was asked for and got."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.contracts import Exactness
from kvkeep.memory.meter import Memory

if TYPE_CHECKING:
    from kvkeep.cache import KeepCache

STOCK_STATE = "transformers' own"


@dataclass(frozen=True)
class LayerReport:
    """What one layer asked for and what it got; ``note`` says why where they differ."""

    layer: int
    kind: str
    requested: str
    effective: str
    requested_budget: str
    entries: int | None
    exactness: str
    note: str


def describe(cache: KeepCache) -> list[LayerReport]:
    """Return, for every layer, the requested and the effective method and budget."""
    budget = "none" if cache.request.budget is None else str(cache.request.budget)
    reports = []
    for layer in cache.geometry.layers:
        effective, entries, note = cache.method.name, cache.entries, ""
        if layer.kind == "sliding":
            effective, entries = "sliding window", layer.window
            note = "the model's own window bounds it already"
        elif layer.kind == "full" and cache.budgets is not None:
            own = cache.budgets[layer.index]
            entries = sum(own) // len(own)
            note = "" if len(set(own)) == 1 else f"by head: {', '.join(map(str, own))}"
        elif layer.kind == "shared":
            effective, entries, note = "none", 0, f"reads the entries of layer {layer.source}"
        elif layer.kind != "full":
            effective, entries, note = STOCK_STATE, None, "not keys and values; left to transformers"
        exactness = str(cache.exactness if layer.kind == "full" else Exactness.EXACT)
        reports.append(
            LayerReport(layer.index, layer.kind, cache.method.name, effective, budget, entries, exactness, note)
        )
    return reports


def memory(cache: KeepCache) -> Memory:
    """Return measured bytes, by what they are for."""
    resident, compressed = cache.resident_bytes(), cache.compressed_bytes()
    cache.meter.cache(resident + compressed)
    places = {"device": 0, "host": 0, "disk": 0}
    bookkeeping = cache.ledger.bookkeeping_bytes + sum(held.bookkeeping_bytes for held in cache.held)
    if cache.made.table is not None:
        bookkeeping += cache.made.table.nbytes
    if cache.positions is not None:
        bookkeeping += cache.positions.nbytes
    if cache.checkpoint is not None:
        places[cache.checkpoint.where] += sum(rows.nbytes for _, rows in cache.checkpoint_rows())
    # Where entries are rebuilt from ids, those are a checkpoint; elsewhere they are only a record.
    if cache.checkpoint is not None and cache.checkpoint.reads_ids:
        places["device"] += cache.ledger.ids.nbytes
    else:
        bookkeeping += cache.ledger.ids.nbytes
    return Memory(
        resident_bytes=resident,
        compressed_bytes=compressed,
        checkpoint_bytes=places,
        bookkeeping_bytes=bookkeeping,
        peak_cache_bytes=cache.meter.peak_cache,
        peak_workspace_bytes=cache.meter.peak_workspace,
    )
