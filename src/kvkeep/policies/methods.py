"""The methods by name: who leaves, what becomes of it, how it comes back, and what that promises.

A method is a selector and a fate, ``"h2o+checkpoint"``; a selector alone drops what leaves. The names without either
keep everything, or are built from parts of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import DynamicCache

from kvkeep.errors import BudgetError, UsageError, unknown
from kvkeep.geometry import LayerGeometry
from kvkeep.models.binding import bind
from kvkeep.policies.fates import FATES, Fate
from kvkeep.policies.fates.cam import Cam
from kvkeep.policies.fates.checkpointed import Checkpointed, checkpoint_for
from kvkeep.policies.fates.dropped import Drop
from kvkeep.policies.fates.ladder import OnLadder
from kvkeep.policies.fates.lowrank import LowRank
from kvkeep.policies.fates.quantised import Quantised
from kvkeep.policies.fates.segmented import Segmented
from kvkeep.policies.fates.sketched import Sketched
from kvkeep.policies.merging import MERGING, Merging
from kvkeep.policies.recalls import RECALLS, Recall
from kvkeep.policies.recalls.missed import Missed
from kvkeep.policies.recalls.verified import Verified
from kvkeep.policies.request import Exactness, Plan, Request
from kvkeep.policies.selectors import SELECTORS, Selector
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.lru import LRU
from kvkeep.policies.selectors.snapkv import SnapKV
from kvkeep.policies.selectors.streaming_llm import StreamingLLM
from kvkeep.policies.selectors.window import Window
from kvkeep.policies.specs import build
from kvkeep.stores.bounded import BoundedLayer
from kvkeep.stores.grown import GrownLayer
from kvkeep.stores.incache import CachePositions
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.merged import MergedLayer
from kvkeep.stores.meter import Meter
from kvkeep.stores.paged import BlockPool, BlockTable, PagedLayer
from kvkeep.stores.parts import Parts
from kvkeep.stores.places import Device
from kvkeep.stores.selected import SelectedLayer


@dataclass(frozen=True)
class Method:
    """One row of the table selector × fate × recall. ``records``: the ids and positions of all tokens are kept."""

    name: str
    selector: str
    fate: str
    recall: str
    exactness: Exactness
    summary: str
    source: str
    options: tuple[str, ...]
    plan: Callable[[Request, Ledger, Meter], Plan]
    records: bool = True


def _stock_layers(request: Request, replace: Callable[[LayerGeometry], Any]) -> list[Any]:
    """Return transformers' own layers with the full ones replaced: sliding windows are bounded already, and
    layers that read another layer's entries hold none."""
    stock = DynamicCache(config=request.model.config).layers
    return [replace(layer) if layer.kind == "full" else stock[layer.index] for layer in request.geometry.layers]


def _full(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    request.refuse("full", "budget", "checkpoint", "where", "capacity", "folder", "chunk")
    return Plan(_stock_layers(request, lambda layer: GrownLayer()))


def _static(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    request.refuse("static", "checkpoint", "where", "capacity", "folder", "chunk")
    if request.budget is None:
        raise UsageError("Method 'static' needs a budget: the most entries it will ever hold (budget=4096).")
    limit = request.budget.entries(request.geometry, context=request.context, batch=request.batch)
    return Plan(_stock_layers(request, lambda layer: GrownLayer(limit=limit)), entries=limit)


def _paged(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    request.refuse("paged", "budget", "checkpoint", "where", "capacity", "folder", "chunk")
    bind(request.model)
    table = BlockTable(BlockPool())
    first = next((layer.index for layer in request.geometry.layers if layer.kind == "full"), 0)
    layers = _stock_layers(request, lambda layer: PagedLayer(table, meter, request.page, leads=layer.index == first))
    return Plan(layers, chunk=sys.maxsize, streams=True)


def _kv_direct(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    entries, chunk = request.bounded("kv-direct", Exactness.EXACT)
    spec, checkpoint = checkpoint_for(request, ledger, meter)
    resident = Device(request.device)
    layers = _stock_layers(request, lambda layer: BoundedLayer(layer.index, entries, resident, checkpoint))
    return Plan(layers, entries, chunk, True, spec, checkpoint)


def combined(
    name: str, selector: Selector, fate: Fate, summary: str = "", source: str = "", recall: Recall | None = None
) -> Method:
    """Return the method that lets ``selector`` choose who leaves, ``fate`` what becomes of it, and ``recall`` how all
    of it comes back from checkpoints; without one, as the fate has it."""
    if recall is not None:
        return _backed(name, selector, fate, recall)

    def plan(request: Request, ledger: Ledger, meter: Meter) -> Plan:
        given = {"checkpoint", "where", "capacity", "folder"} - set(fate.options)
        request.refuse(name, *sorted(given))
        fate.check(name, selector)
        entries, chunk = request.bounded(name, fate.exactness)
        if not entries and fate.exactness is not Exactness.EXACT:
            raise BudgetError(f"A budget of 0 leaves '{name}' nothing to attend to; only with checkpoints it would.")
        bind(request.model)
        live = fate.build(request, ledger, meter)
        sinks = selector.sinks_in_cache(live.forgets)
        held = fate.resident(request.geometry, entries)
        if sinks is not None:  # whose keys are held as they came, too
            held -= (sinks + 1) // 2
        positions = None if sinks is None else _in_cache(request, sinks, held, chunk)
        budgets = selector.budgets(request.model, request.geometry, held)
        home = Device(request.device)
        layers = _stock_layers(
            request,
            lambda layer: fate.layers(Parts(layer.index, budgets[layer.index], selector, live, home, ledger, meter)),
        )
        return Plan(layers, entries, chunk, True, *fate.checkpoint(live), live, budgets, positions)

    return Method(
        name,
        selector.leaves,
        fate.label,
        fate.recall,
        fate.exactness,
        summary or _first_line(selector),
        source or selector.source,
        ("budget", "chunk", *fate.options),
        plan,
        fate.records,
    )


def _backed(name: str, selector: Selector, fate: Fate, recall: Recall, summary: str = "", source: str = "") -> Method:
    """Return the method whose entries are all in checkpoints too, so that any that left may come back."""
    if fate.layers is not SelectedLayer:
        raise UsageError(f"'{name}' is not understood: what is {fate.label} stays so, and takes no recall.")
    kind = fate.kind if isinstance(fate, Checkpointed) else ""
    fate = Drop() if isinstance(fate, Checkpointed) else fate

    def plan(request: Request, ledger: Ledger, meter: Meter) -> Plan:
        request.refuse(name, *sorted({"capacity"} - set(recall.options)))
        entries, chunk = request.bounded(name, recall.exactness)
        bind(request.model)
        place = request.where or recall.place
        spec, log = checkpoint_for(replace(request, checkpoint=kind or request.checkpoint, where=place), ledger, meter)
        live = fate.build(request, ledger, meter)
        recall.check(live, log)
        round = recall.round(entries)
        tail = 0 if round is None else round.tail
        held = fate.resident(request.geometry, entries) - tail
        if held < 1:
            raise BudgetError(f"A budget of {entries} entries leaves '{name}' nothing to attend to; give it more.")
        budgets = selector.budgets(request.model, request.geometry, held)
        home, made = Device(request.device), recall.layers(log, round)
        layers = _stock_layers(
            request,
            lambda layer: made(Parts(layer.index, budgets[layer.index], selector, live, home, ledger, meter)),
        )
        return Plan(layers, entries, chunk, True, spec, log, live, budgets, round=round)

    return Method(
        name,
        selector.leaves,
        "checkpointed" if isinstance(fate, Drop) else f"{fate.label} and checkpointed",
        recall.label,
        recall.exactness,
        summary or _first_line(recall),
        source or selector.source,
        recall.options,
        plan,
    )


def merging(name: str, how: Merging) -> Method:
    """Return the method whose least attended neighbours become one entry, ``how`` says with which key."""

    def plan(request: Request, ledger: Ledger, meter: Meter) -> Plan:
        request.refuse(name, "checkpoint", "where", "capacity", "folder")
        entries, chunk = request.bounded(name)
        how.check(name, entries)
        chunk = chunk if request.chunk is not None else how.chunk(entries, chunk)
        adapter = bind(request.model)
        full = [layer.index for layer in request.geometry.full_layers]
        adapter.require("turn", full, "merging, which turns keys to new positions", "use h2o+merge")
        live = Drop().build(request, ledger, meter)
        home = Device(request.device)
        sources = [layer.source for layer in request.geometry.layers]

        def layer(own: LayerGeometry) -> MergedLayer:
            readers = sources.count(own.index)
            return MergedLayer(Parts(own.index, (entries,), H2O(), live, home, ledger, meter), how, adapter, readers)

        budgets = [(entries,)] * len(sources)
        return Plan(_stock_layers(request, layer), entries, chunk, True, fate=live, budgets=budgets)

    return Method(
        name,
        "the least attended neighbours",
        "merged",
        "never",
        Exactness.LOSSY,
        _first_line(how),
        how.source,
        ("budget", "chunk"),
        plan,
        False,
    )


def _first_line(made: object) -> str:
    return (type(made).__doc__ or "").partition("\n")[0].replace("``", "")


def _in_cache(request: Request, sinks: int, entries: int, chunk: int) -> CachePositions:
    """Return positions within the cache. Raises UnsupportedModelError where keys cannot be turned, and BudgetError
    where the cache itself is longer than what the model knows positions for."""
    adapter, limit = bind(request.model), request.geometry.max_positions
    full = [layer.index for layer in request.geometry.full_layers]
    adapter.require("turn", full, "positions within the cache", "use streaming-llm:positions=absolute")
    if limit is not None and entries + chunk > limit:
        raise BudgetError(
            f"A cache of {entries} entries and a chunk of {chunk} have more positions than the model's {limit}; give a "
            "smaller budget, or use streaming-llm:positions=absolute."
        )
    return CachePositions(adapter, min(sinks, entries), entries, limit or 2**15)


_KEPT = (
    Method(
        "full",
        "nobody",
        "kept",
        "not needed",
        Exactness.EXACT,
        "All entries, in buffers that grow by blocks; a step copies one entry.",
        "kv-caching-tutorial, section 7",
        (),
        _full,
    ),
    Method(
        "static",
        "nobody",
        "kept",
        "not needed",
        Exactness.EXACT,
        "All entries, in memory allocated once for the budget's entries.",
        "kv-caching-tutorial, section 13",
        ("budget",),
        _static,
    ),
    Method(
        "paged",
        "nobody",
        "kept",
        "not needed",
        Exactness.EXACT,
        "All entries, in blocks of 32; rows and forks that begin alike share them, copy-on-write.",
        "arXiv:2309.06180, section 4",
        (),
        _paged,
    ),
    Method(
        "kv-direct",
        "oldest",
        "checkpointed",
        "all pages, exact",
        Exactness.EXACT,
        "The newest entries within the budget; older ones are rebuilt exactly, page by page, as they are read.",
        "arXiv:2603.19664, Algorithm 1",
        ("budget", "checkpoint", "where", "capacity", "folder", "chunk", "page"),
        _kv_direct,
    ),
)


@dataclass(frozen=True)
class _Preset:
    """A selector and a fate that are known by one name: its parameters are the fate's, ``defaults`` first."""

    selector: Selector
    fate: type[Fate]
    defaults: dict[str, Any]
    summary: str
    source: str

    def with_parameters(self, spec: str) -> Fate:
        """Return the fate with the parameters in ``spec``."""
        fate = build("method", spec, {spec.partition(":")[0]: self.fate})
        own = {key for key, value in vars(fate).items() if value != getattr(self.fate(), key)}
        return replace(fate, **{key: value for key, value in self.defaults.items() if key not in own})

    def build(self, spec: str, recall: Recall | None = None) -> Method:
        """Return the method called ``spec``."""
        fate = self.with_parameters(spec.partition("+")[0])
        return combined(spec, self.selector, fate, self.summary, self.source, recall)


PRESETS: dict[str, _Preset] = {
    "quantized": _Preset(
        Window(),
        Quantised,
        {"exact": 128},
        "The newest entries exactly, older ones at 8, 4 or 2 bits: keys per channel, values per token.",
        "arXiv:2402.02750",
    ),
    "lowrank": _Preset(
        Window(),
        LowRank,
        {"exact": 1},
        "Entries truncated to a rank of each head's projections; here to show that it fails.",
        "arXiv:2603.19664, section 5.7",
    ),
    "revive": _Preset(
        H2O(halflife=256),
        OnLadder,
        {},
        "Newest and heavy entries exactly, all others at 16, 8, 4 or 2 bits by the attention they get now.",
        "kvkeep; codes after arXiv:2402.02750",
    ),
    "longcache": _Preset(
        StreamingLLM(),
        Segmented,
        {},
        "Sinks, the newest, and for each query the most promising segments of all others: bounded work, not memory.",
        "LongCache (Liu et al., 2024)",
    ),
    "cam": _Preset(
        H2O(),
        Cam,
        {},
        "Heavy hitters and the newest; values of what leaves go into the next that stay, with chance.",
        "CaM (Zhang et al., ICML 2024)",
    ),
    "kvreviver": _Preset(
        H2O(),
        Sketched,
        {"swap": 1.1},
        "Recent entries and heavy hitters exactly, all others in a count sketch; they may come back, as estimates.",
        "KVReviver, Algorithms 1 to 4",
    ),
}

_KV_LRU = _backed(
    "kv-lru",
    LRU(),
    Checkpointed(),
    Missed(),
    "What was used least recently leaves; after a step, what it may have missed comes back, 64 entries at most.",
    LRU.source,
)

METHODS: dict[str, Method] = {
    **{method.name: method for method in _KEPT},
    **{name: combined(name, selector(), Drop()) for name, selector in SELECTORS.items() if name != "kvpress"},
    **{name: preset.build(name) for name, preset in PRESETS.items()},
    **{name: merging(name, how()) for name, how in MERGING.items()},
    "snapkv+verified": combined("snapkv+verified", SnapKV(), Drop(), recall=Verified()),
    _KV_LRU.name: _KV_LRU,
}
"""The methods by name. Any ``SELECTOR+FATE`` is one too: see :func:`resolve`."""


def resolve(spec: str) -> Method:
    """Return the method that ``spec`` names: one of :data:`METHODS`, or ``SELECTOR``, ``SELECTOR+FATE``,
    ``SELECTOR+FATE+RECALL``, each with parameters after a colon (``streaming-llm:sinks=8+quantize:4``). Where the fate
    is left out, what leaves is dropped, or left to the recall. Raises UsageError with the near matches."""
    if spec in METHODS:
        return METHODS[spec]
    first, *rest = spec.split("+")
    name = first.partition(":")[0]
    recalls = bool(rest) and rest[-1].partition(":")[0] in RECALLS
    recall = build("recall", rest.pop(), RECALLS) if recalls else None
    if name in MERGING and not rest and recall is None:
        return merging(spec, build("method", first, MERGING))
    if name in PRESETS and not rest:
        return PRESETS[name].build(spec, recall)
    if name not in SELECTORS:
        if name in METHODS:
            without = "a fate or a recall" if name in MERGING else "parameters or a fate"
            raise UsageError(f"'{spec}' is not understood: '{name}' is a method of its own, without {without}.")
        raise unknown("method", name, [*METHODS, "stock"])
    selector = build("selector", first, SELECTORS)
    fate = build("fate", "+".join(rest) if rest else "drop", FATES)
    return combined(spec, selector, fate, recall=recall)
