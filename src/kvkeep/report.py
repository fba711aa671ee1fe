"""Reports: the bytes of a cache, and requested and effective settings of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.contracts import Exactness
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.policies.assembly import Assembly
from kvkeep.policies.request import Request

STOCK_STATE = "transformers' own"


@dataclass(frozen=True)
class LayerReport:
    """Requested and effective settings of one layer; ``note``: why they differ."""

    layer: int
    kind: str
    requested: str
    effective: str
    requested_budget: str
    entries: int | None
    exactness: str
    note: str


def describe(request: Request, geometry: ModelGeometry, made: Assembly, exactness: Exactness) -> list[LayerReport]:
    """Return, for every layer, the requested and the effective method and budget; ``exactness``: of full layers."""
    budget, name = "none" if request.budget is None else str(request.budget), request.method.name
    reports = []
    for layer in geometry.layers:
        effective, entries, note = name, made.entries, ""
        if layer.kind == "sliding":
            effective, entries = "sliding window", layer.window
            note = "the model's own window bounds it already"
        elif layer.kind == "full" and made.budgets is not None:
            own = made.budgets[layer.index]
            entries = sum(own) // len(own)
            note = "" if len(set(own)) == 1 else f"by head: {', '.join(map(str, own))}"
        elif layer.kind == "shared":
            effective, entries, note = "none", 0, f"reads the entries of layer {layer.source}"
        elif layer.kind != "full":
            effective, entries, note = STOCK_STATE, None, "not keys and values; left to transformers"
        own_exactness = str(exactness if layer.kind == "full" else Exactness.EXACT)
        reports.append(LayerReport(layer.index, layer.kind, name, effective, budget, entries, own_exactness, note))
    return reports


def memory(made: Assembly, held: Sequence[Any]) -> Memory:
    """Return measured bytes by purpose. held: the state of each layer."""
    resident, compressed = (sum(getattr(one, kind) for one in held) for kind in ("resident_bytes", "compressed_bytes"))
    made.meter.cache(resident + compressed)
    places = {"device": 0, "host": 0, "disk": 0}
    shared = (made.table, made.positions)
    bookkeeping = made.ledger.bookkeeping_bytes + sum(one.bookkeeping_bytes for one in held)
    bookkeeping += sum(one.nbytes for one in shared if one is not None)
    if made.checkpoint is not None:
        places[made.checkpoint.where] += sum(rows.nbytes for _, rows in made.checkpoint.stores())
    # Where entries are rebuilt from ids, those are a checkpoint; elsewhere they are only a record.
    if made.checkpoint is not None and made.checkpoint.reads_ids:
        places["device"] += made.ledger.ids.nbytes
    else:
        bookkeeping += made.ledger.ids.nbytes
    return Memory(
        resident_bytes=resident,
        compressed_bytes=compressed,
        checkpoint_bytes=places,
        bookkeeping_bytes=bookkeeping,
        peak_cache_bytes=made.meter.peak_cache,
        peak_workspace_bytes=made.meter.peak_workspace,
    )
