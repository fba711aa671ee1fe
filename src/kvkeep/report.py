"""Reports: the bytes of a cache, and requested and effective settings of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.contracts.exactness import Exactness
from kvkeep.geometry import WITHOUT_CACHE, ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.models.binding import bind
from kvkeep.models.packed import row_independent
from kvkeep.policies.assembly import Assembly
from kvkeep.policies.methods import Request

_OTHER = {
    "shared": ("none", 0, "reads the entries of layer {source}"),
    "recurrent": ("recurrent state", 0, "has no keys and values; its state has a fixed size"),
    **dict.fromkeys(WITHOUT_CACHE, ("none", 0, "holds nothing of the text")),
}
"""Of kinds of layers without keys and values of their own: the effective method, the entries, and why."""
_UNKNOWN = ("transformers' own", None, "has no keys and values; transformers manages its state")


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
    with the length of a text, unless the request's ``context`` stays below that length."""


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
    same = exactness is Exactness.EXACT and same_bits(request, geometry, made, model)
    budget, name = "none" if request.budget is None else str(request.budget), request.method.name
    reports, notes = [], _notes(request, geometry)
    for layer in geometry.layers:
        promise = exactness if layer.kind == "full" else Exactness.EXACT
        if layer.kind == "full":
            by_head = [] if budgets is None else budgets[layer.index]
            effective, entries = name, sum(by_head) // len(by_head) if by_head else made.entries
            differ = f"by head: {', '.join(map(str, by_head))}" if len(set(by_head)) > 1 else ""
            beside = "it also has a recurrent state, whose size is fixed" if layer.recurrent else ""
            note = "; ".join(one for one in (differ, beside, *notes) if one)
        elif layer.kind == "sliding":
            effective, entries, note = "sliding window", layer.window, "the model's own window limits it"
        else:
            kind = "recurrent" if layer.recurrent else layer.kind
            effective, entries, note = _OTHER.get(kind, _UNKNOWN)
        note = note.format(source=layer.source)
        reports.append(LayerReport(layer.index, layer.kind, name, effective, budget, entries, str(promise), note, same))
    return reports


def same_bits(request: Request, geometry: ModelGeometry, made: Assembly, model: Any) -> bool:
    """Return :attr:`LayerReport.same_bits` of a cache that has lost nothing."""
    in_order = all(state.in_order for state in made.states.values())
    return in_order and same_bits_of_steps(request, geometry, made, model)


def same_bits_of_steps(request: Request, geometry: ModelGeometry, made: Assembly, model: Any) -> bool:
    """Return whether a pass over several tokens, whose recurrent modules read one after the other, has the bits of
    single steps."""
    same = made.exact and request.method.exactness is Exactness.EXACT and not geometry.unbounded_layers
    if not (same and geometry.steady(request.context) and _in_order(request, made, model) and row_independent(model)):
        return False
    return not geometry.recurrent_layers or bind(model).runs_all(geometry.recurrent_layers)


def _notes(request: Request, geometry: ModelGeometry) -> list[str]:
    """Return when the full layers exceed their budget, or are not exact."""
    method, notes = request.method, []
    if method.oneshot:
        notes.append("a prompt is read in one pass; before it is compressed, one layer at a time holds all of it")
    if method.pin:
        notes.append(f"the first {method.pin:,} tokens are pinned")
    if method.exactness is Exactness.EXACT and not geometry.steady(request.context):
        notes.append(
            f"lossy beyond {geometry.steady_positions} tokens: the model's rotary frequencies change there, and tokens "
            "read before keep the earlier ones"
        )
    if method.recall.endless and (exact := method.recall.exact_tokens(geometry)) is not None:
        notes.append(
            f"exact up to {exact:,} tokens; beyond them, a step attends to the newest tokens and to recalled passages"
        )
        if request.capacity is not None:
            notes[-1] += f"; of more than {request.capacity:,} older tokens, the oldest are dropped"
    return notes


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
        places |= made.checkpoint.allocated()
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
