"""Reports: the bytes of a cache, and requested and effective settings of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.contracts.exactness import Exactness
from kvkeep.geometry import WITHOUT_CACHE, ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.models.bits import row_independent
from kvkeep.policies.assembly import Assembly
from kvkeep.policies.request import Request

STOCK_STATE = "transformers' own"
HYBRID_NOTE = "it also has a recurrent state, whose size is fixed"
ONESHOT_NOTE = "a prompt is read in one pass; before it is compressed, one layer at a time holds all of it"


@dataclass(frozen=True)
class LayerReport:
    """Requested and effective settings of one layer."""

    layer: int
    kind: str
    requested: str
    effective: str
    requested_budget: str
    entries: int | None
    exactness: str
    note: str
    """Why requested and effective settings differ, or when the cache exceeds the budget."""
    same_bits: bool
    """Whether logits have the bits of the unbounded cache that reads one token at a time, for any chunk, budget and
    batch. That requires an exact method, the kernel's attention over entries in the order of the text, and a model
    whose products do not depend on the number of rows (a trial shows it).

    It is False where latents are expanded in the step, which adds in another order, and where rotary frequencies change
    with the length of a text, unless the request's ``context`` stays below that length. There is one exception to True:
    rows of a batch that were answered in rounds and accepted different numbers of tokens have holes between their
    entries, and beyond 512 entries their bits differ."""


def describe(
    request: Request,
    geometry: ModelGeometry,
    made: Assembly,
    budgets: Sequence[Sequence[int]] | None,
    exactness: Exactness,
    model: Any,
) -> list[LayerReport]:
    """Return, for every layer, the requested and the effective method and budget. ``budgets``: entries by layer and
    head, if they differ; ``exactness``: that of full layers."""
    promised = exactness is request.method.exactness is Exactness.EXACT
    same = made.exact and promised and not geometry.other_layers
    same = same and geometry.steady(request.context)
    same = same and _in_order(request, made, model) and row_independent(model)
    budget, name = "none" if request.budget is None else str(request.budget), request.method.name
    reports = []
    for layer in geometry.layers:
        effective, entries, note = name, made.entries, ""
        if layer.kind == "sliding":
            effective, entries = "sliding window", layer.window
            note = "the model's own window limits it"
        elif layer.kind == "full" and budgets is not None:
            by_head = budgets[layer.index]
            entries = sum(by_head) // len(by_head)
            note = "" if len(set(by_head)) == 1 else f"by head: {', '.join(map(str, by_head))}"
        elif layer.kind == "shared":
            effective, entries, note = "none", 0, f"reads the entries of layer {layer.source}"
        elif layer.kind in WITHOUT_CACHE:
            effective, entries, note = "none", 0, "holds nothing of the text"
        elif layer.kind != "full" and layer.recurrent:
            effective, entries, note = "recurrent state", 0, "has no keys and values; its state has a fixed size"
        elif layer.kind != "full":
            effective, entries, note = STOCK_STATE, None, "has no keys and values; transformers manages its state"
        if layer.kind == "full" and layer.recurrent:
            note = f"{note}; {HYBRID_NOTE}" if note else HYBRID_NOTE
        if layer.kind == "full" and request.method.oneshot:
            note = f"{note}; {ONESHOT_NOTE}" if note else ONESHOT_NOTE
        if (
            layer.kind == "full"
            and request.method.exactness is Exactness.EXACT
            and not geometry.steady(request.context)
        ):
            note = f"{note}; {_unsteady(geometry)}" if note else _unsteady(geometry)
        if layer.kind == "full" and request.method.recall.endless:
            exact = request.method.recall.exact_tokens(geometry)
            if exact is not None:
                note = f"{note}; {beyond(exact)}" if note else beyond(exact)
                if request.capacity is not None:
                    note += f"; of more than {request.capacity:,} older tokens, the oldest are dropped"
        own_exactness = str(exactness if layer.kind == "full" else Exactness.EXACT)
        reports.append(
            LayerReport(layer.index, layer.kind, name, effective, budget, entries, own_exactness, note, same)
        )
    return reports


def beyond(exact: int) -> str:
    """Return what becomes of a text that is longer than its ``exact`` first tokens, in a few words."""
    return f"exact up to {exact:,} tokens; beyond them, a step attends to the newest tokens and to recalled blocks"


def _unsteady(geometry: ModelGeometry) -> str:
    """Return why a longer text is not exact."""
    return (
        f"lossy beyond {geometry.steady_positions} tokens: the model's rotary frequencies change there, and tokens "
        "read before keep the earlier ones"
    )


def _in_order(request: Request, made: Assembly, model: Any) -> bool:
    """Return whether attention goes through entries in the order of the text, all of them by one kernel."""
    if not made.streams:
        return True
    latent = any(hasattr(module, "expand_kv") for module in model.modules())
    chosen = made.budgets is not None or request.method.reading is not None
    return not latent and (not chosen or request.method.recall.backed)


def memory(made: Assembly) -> Memory:
    """Return measured bytes by purpose."""
    holdings = made.holdings
    resident, compressed = (
        sum(getattr(one, kind) for one in holdings) for kind in ("resident_bytes", "compressed_bytes")
    )
    made.meter.cache(resident + compressed)
    places = {"device": 0, "host": 0, "disk": 0}
    ledger = made.ledger
    bookkeeping = ledger.padding_bytes + sum(one.bookkeeping_bytes for one in holdings)
    bookkeeping += 0 if made.positions is None else made.positions.nbytes
    if made.checkpoint is not None:
        places[made.checkpoint.home.name] += sum(rows.nbytes for _, rows in made.checkpoint.stores())
    # Where entries are rebuilt from ids, those are a checkpoint; elsewhere they are only a record.
    rebuilds = made.checkpoint is not None and made.checkpoint.reads_ids
    if ledger.home is None:  # elsewhere they take no memory
        bookkeeping += ledger.positions.nbytes + (0 if rebuilds else ledger.ids.nbytes)
        places["device"] += ledger.ids.nbytes if rebuilds else 0
    return Memory(
        resident_bytes=resident,
        compressed_bytes=compressed,
        checkpoint_bytes=places,
        bookkeeping_bytes=bookkeeping,
        peak_cache_bytes=made.meter.peak_cache,
        peak_workspace_bytes=made.meter.peak_workspace,
    )
