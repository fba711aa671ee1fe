"""Assembly: the layers of one cache, made of a request and a model. The one place where parts meet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvkeep.contracts import Checkpoint, Site
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.memory.places import place
from kvkeep.models.binding import bind, watch
from kvkeep.policies.methods import Method
from kvkeep.policies.request import Request
from kvkeep.stores.cache_positions import CachePositions
from kvkeep.stores.checkpoints.entries import Entries
from kvkeep.stores.checkpoints.residuals import Residuals
from kvkeep.stores.checkpoints.spec import CheckpointSpec
from kvkeep.stores.dynamic import DynamicLayer, SlidingLayer
from kvkeep.stores.layer import Layer
from kvkeep.stores.newest import Newest
from kvkeep.stores.paged import BlockPool, BlockTable, Paged
from kvkeep.stores.round import Round
from kvkeep.stores.selected import Selected


@dataclass(frozen=True)
class Assembly:
    """What a cache is made of: the layers, and what they share. ``entries``: the effective budget of each full layer;
    ``chunk``: tokens of a prompt taken at a time; ``streams``: attention adds the past itself; ``budgets``: entries
    by layer and head, where they differ; ``positions``: those within the cache, if so; ``round``: of draft and verify,
    where drafts can be made; ``table``: of blocks, where entries are paged; ``decoder``: whose forward passes these
    are, where it streams."""

    layers: list[Any]
    ledger: Ledger
    meter: Meter
    device: torch.device
    entries: int | None = None
    chunk: int = 0
    streams: bool = False
    spec: CheckpointSpec | None = None
    checkpoint: Checkpoint | None = None
    budgets: Sequence[Sequence[int]] | None = None
    positions: CachePositions | None = None
    round: Round | None = None
    table: BlockTable | None = None
    decoder: Any = None


def assemble(request: Request, model: Any, geometry: ModelGeometry) -> Assembly:
    """Return what a cache of ``model`` is made of. Raises BudgetError, UnsupportedModelError, StoreError or UsageError
    where it cannot be made."""
    method, device = request.method, next(model.parameters()).device
    spec = request.spec(geometry, device.type) if method.checkpoints else None
    # Ids and positions are kept where something is rebuilt from them.
    ledger, meter = Ledger(method.store_fate.records or (spec is not None and spec.kind != "kv")), Meter()
    if not method.selector.keeps_all:
        return _bounded(request, model, geometry, ledger, meter, spec)
    watch(model)
    layout = method.selector.layout
    if layout == "dynamic":
        return Assembly(_layers(model, geometry, lambda layer: DynamicLayer()), ledger, meter, device)
    if layout == "static":
        assert request.budget is not None
        limit = request.budget.entries(geometry, context=request.context, batch=request.batch)
        return Assembly(_layers(model, geometry, lambda layer: DynamicLayer(limit)), ledger, meter, device, limit)
    adapter = bind(model)
    table = BlockTable(BlockPool())
    build = _Builder(request, model, geometry, ledger, meter, 0, None)
    layers = _layers(model, geometry, lambda layer: build.layer(layer, (), lambda site, store: Paged(site, table)))
    return Assembly(
        layers, ledger, meter, device, chunk=sys.maxsize, streams=True, table=table, decoder=adapter.decoder
    )


def _bounded(
    request: Request, model: Any, geometry: ModelGeometry, ledger: Ledger, meter: Meter, spec: CheckpointSpec | None
) -> Assembly:
    method = request.method
    selector = method.selector
    entries, chunk = request.entries(geometry)
    tail, within, held, sinks = method.division(geometry, entries)
    method.store_fate.check(model, geometry)
    adapter = bind(model)
    build = _Builder(request, model, geometry, ledger, meter, within, spec)
    positions = None if sinks is None else _positions(model, geometry, sinks, held, chunk)
    budgets = selector.budgets(model, geometry, held)
    if tail:
        assert build.checkpoint is not None
        build.round = Round(tail, ledger, build.checkpoint)

    def layer(own: LayerGeometry) -> Layer:
        if selector.in_order:
            return build.layer(own, budgets[own.index], Newest)
        return build.layer(
            own, budgets[own.index], lambda site, store: Selected(site, selector, site.budgets, store, tail)
        )

    layers = _layers(model, geometry, layer)
    if build.round is not None:
        build.round.layers = [layers[own.index] for own in geometry.full_layers]
        build.round.windows = [layers[own.index] for own in geometry.sliding_layers]
    return Assembly(
        layers,
        ledger,
        meter,
        build.device,
        entries,
        chunk,
        True,
        build.spec,
        build.checkpoint,
        None if selector.in_order else budgets,
        positions,
        build.round,
        decoder=adapter.decoder,
    )


class _Builder:
    """What all layers of one cache are made with."""

    def __init__(
        self,
        request: Request,
        model: Any,
        geometry: ModelGeometry,
        ledger: Ledger,
        meter: Meter,
        entries: int,
        spec: CheckpointSpec | None,
    ) -> None:
        self.request, self.model, self.geometry, self.ledger, self.meter = request, model, geometry, ledger, meter
        self.entries = entries
        self.device = next(model.parameters()).device
        self.method: Method = request.method
        self.spec = spec
        self.checkpoint: Checkpoint | None = None
        self.round: Round | None = None
        if spec is not None:
            self.checkpoint = self._checkpoint(spec)
            if self.method.recall.reads_single and not self.checkpoint.picks:
                raise UsageError(
                    "Recalling single entries needs checkpoint kind 'kv' or 'residual': the others rebuild all."
                )
        self.shared = self.method.store_fate.shared(geometry, ledger)
        self._sources = [layer.source for layer in geometry.layers]
        self._first = next((layer.index for layer in geometry.full_layers), None)

    def _checkpoint(self, spec: CheckpointSpec) -> Checkpoint:
        """Return the checkpoint. Raises UnsupportedModelError where the model cannot be rebuilt so."""
        adapter, full = bind(self.model), [layer.index for layer in self.geometry.full_layers]
        home = place(spec.where, self.device, spec.folder)
        if spec.kind == "kv":
            return Entries(home, self.device, full, spec, self.meter, self.request.page)
        adapter.require("project", full, f"checkpoint kind '{spec}'")
        if spec.kind == "tokens" or spec.stride > 1:
            adapter.require("advance", full, f"checkpoint kind '{spec}'")
        return Residuals(adapter, self.ledger, home, self.geometry, spec, self.meter, self.request.page)

    def layer(self, own: LayerGeometry, budgets: Sequence[int], resident: Callable[..., Any]) -> Layer:
        """Return a layer of parts; ``resident``: what makes the resident entries, of a site and a store."""
        site = Site(
            own,
            self.geometry,
            self.model,
            self.entries,
            budgets,
            self.method.selector.in_order,
            self.request.page,
            self._sources.count(own.index),
            own.index == self._first,
            self.ledger,
            self.meter,
            self.device,
            self.checkpoint,
        )
        store = self.method.store_fate.store(site, self.shared)
        return Layer(site, resident(site, store), store, self.method.recall.reader(site, self.round))


def _layers(model: Any, geometry: ModelGeometry, full: Callable[[LayerGeometry], Any]) -> list[Any]:
    """Return the layers of a cache: full ones as asked for; sliding windows are bounded already; layers that read
    another layer's entries hold none, and what is not keys and values is left to transformers."""
    stock = DynamicCache(config=model.config).layers
    return [
        full(layer)
        if layer.kind == "full"
        else SlidingLayer(layer.window)
        if layer.kind == "sliding" and layer.window is not None
        else stock[layer.index]
        for layer in geometry.layers
    ]


def _positions(model: Any, geometry: ModelGeometry, sinks: int, entries: int, chunk: int) -> CachePositions:
    """Return positions within the cache. Raises UnsupportedModelError where keys cannot be turned, and BudgetError
    where the cache itself is longer than what the model knows positions for."""
    adapter, limit = bind(model), geometry.max_positions
    full = [layer.index for layer in geometry.full_layers]
    adapter.require("turn", full, "positions within the cache", "use streaming-llm:positions=absolute")
    if limit is not None and entries + chunk > limit:
        raise BudgetError(
            f"A cache of {entries} entries and a chunk of {chunk} have more positions than the model's {limit}; give a "
            "smaller budget, or use streaming-llm:positions=absolute."
        )
    return CachePositions(adapter, min(sinks, entries), entries, limit or 2**15)
