"""Assembly: makes the layers of one cache from a request and a model. Only this module combines parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import Resident
from kvkeep.errors import BudgetError, UnsupportedModelError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.memory.places import place
from kvkeep.models.adapter import devices, processes
from kvkeep.models.binding import bind, watch
from kvkeep.models.recurrences import layers_in_order
from kvkeep.policies.methods import Request
from kvkeep.policies.registry import Method
from kvkeep.step import choice
from kvkeep.stores.checkpoints.entries import EntryCheckpoint
from kvkeep.stores.checkpoints.prices import price_of_residuals
from kvkeep.stores.checkpoints.residuals import ResidualCheckpoint
from kvkeep.stores.checkpoints.spec import CheckpointSpec
from kvkeep.stores.checkpoints.staged import StagedCheckpoint, stages
from kvkeep.stores.dynamic import holding_of
from kvkeep.stores.in_order import InOrder, Newest
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.draft_passes import DraftPasses
from kvkeep.stores.recurrent import RecurrentState
from kvkeep.stores.resident.cache_positions import CachePositions
from kvkeep.stores.resident.selected import Selected
from kvkeep.stores.sliding import SlidingLayer


@dataclass(frozen=True)
class Assembly:
    """The layers of a cache, and the objects that they share."""

    layers: list[Any]
    ledger: Ledger
    meter: Meter
    device: torch.device
    exact: bool
    """Kernels compute attention, with bits that depend on the entries alone."""
    entries: int | None = None
    """The effective budget of each full layer."""
    chunk: int = 0
    """Tokens of a prompt read at a time."""
    streams: bool = False
    """The model sees only new entries; the cache attends to the past."""
    spec: CheckpointSpec | None = None
    checkpoint: Checkpoint | None = None
    budgets: Sequence[Sequence[int]] | None = None
    """Entries by layer and head, where they differ."""
    positions: CachePositions | None = None
    """Positions within the cache, where the method uses them."""
    draft_passes: DraftPasses | None = None
    """The passes that draft, where the method does."""
    decoder: Any = None
    """The decoder whose forward passes the cache streams."""
    latent: bool = False
    """The cache holds latents, which attention expands."""
    states: dict[int, RecurrentState] = field(default_factory=dict)
    """The recurrent states, by layer. A layer without keys and values is its state; a hybrid layer has one besides."""

    @property
    def beside(self) -> dict[int, RecurrentState]:
        """The recurrent states of hybrid layers, which hold keys and values, too."""
        return {index: state for index, state in self.states.items() if self.layers[index] is not state}

    @property
    def holdings(self) -> list[Any]:
        """What the layers hold, and then the states beside them."""
        return [*map(holding_of, self.layers), *self.beside.values()]


def assemble(
    request: Request,
    model: Any,
    geometry: ModelGeometry,
    shares: Sequence[Sequence[int]] | None = None,
    meter: Meter | None = None,
) -> Assembly:
    """Make the layers of a cache for ``model``. shares: the entries of each full layer's lanes; None: the selector
    gives them. meter: one that has measured the cache before. Raises BudgetError, UnsupportedModelError, StoreError or
    UsageError where that is impossible."""
    _check_places(request.method, model)
    method = request.method
    if not method.selector.keeps_all:
        return _bounded(request, model, geometry, shares, meter or Meter())
    build = _Builder(request, model, geometry, meter or Meter())
    exact, entries = _exact(model, geometry), None
    if request.budget is not None:
        entries = request.budget.entries(geometry, context=request.context, batch=request.batch)
    pieces = exact and not bind(model).latent  # the kernel attends to pieces
    made = build.assembly(build.layers(lambda layer: method.selector.layer(entries, pieces)), exact)
    return replace(made, entries=entries)


def _check_places(method: Method, model: Any) -> None:
    """Raise UnsupportedModelError where a model's weights lie in several places and the method needs them in one."""
    if method.selector.keeps_all:
        return
    if (parts := processes(model)) > 1:
        why = None
        if method.selector.across_heads:
            why = f"'{method.name}' decides for KV heads together"
        elif method.recall.drafts:
            why = f"'{method.name}' chooses the length of its drafts by timing, which differs between processes"
        if why is not None:
            raise UnsupportedModelError(
                f"The heads of this model are split over {parts} processes (tensor parallel), and {why}; use "
                "'full', 'kv-direct', 'h2o' or 'snapkv', which treat each head by itself."
            )
    found = devices(model)
    if found and next(model.parameters()).device.type == "meta":
        raise UnsupportedModelError(
            "The embedding of this model is offloaded, so its device is unknown; keep the embedding on a device "
            "in 'device_map', or use 'full'."
        )
    if len(found) > 1:
        raise UnsupportedModelError(
            f"The layers of this model are on several devices ({', '.join(found)}), and '{method.name}' "
            "keeps what layers share on one; put the model on one device, or use 'full'."
        )


def _bounded(
    request: Request, model: Any, geometry: ModelGeometry, shares: Sequence[Sequence[int]] | None, meter: Meter
) -> Assembly:
    method, selector = request.method, request.method.selector
    entries, chunk = request.entries(geometry, next(model.parameters()).device.type)
    tail, within, resident, sinks = method.division(geometry, entries)
    method.store_fate.check(model, geometry)
    method.recall.check(model, geometry, entries, chunk)
    method.recall.check_capacity(geometry, request.capacity, entries + chunk)
    adapter = bind(model)
    if method.recall.drafts and not adapter.runs_all(geometry.recurrent_layers):
        raise UnsupportedModelError(
            f"'{geometry.model_type}' has recurrent layers, and kvkeep does not find all modules that compute their "
            f"states, so '{method.name}' cannot take back drafted tokens; use kv-direct."
        )
    build = _Builder(request, model, geometry, meter, within, tail)
    ahead = 1 if method.oneshot else chunk  # the prompt's length is unknown
    positions = None if sinks is None else _positions(model, geometry, sinks, resident, ahead)
    budgets = method.budgets(model, geometry, resident)
    if shares is not None:
        for layer, share in zip(geometry.full_layers, shares, strict=True):
            budgets[layer.index] = share
    if selector.ahead:
        full = [layer.index for layer in geometry.full_layers]
        adapter.require("turn", full, "queries of positions ahead", "use snapkv or h2o")

    layers = build.layers(lambda layer: build.layer(layer, budgets[layer.index]))
    return replace(
        build.assembly(layers, _exact(model, geometry)),
        entries=entries,
        chunk=chunk,
        streams=True,
        budgets=None if selector.in_order else budgets,
        positions=positions,
        draft_passes=build.draft_passes,
        decoder=adapter.decoder,
        latent=adapter.latent,
    )


def _exact(model: Any, geometry: ModelGeometry) -> bool:
    """Let kernels attend for ``model`` where they can: they read entries of its type, heads have supported widths, and
    attention can be replaced. Return whether they do. Otherwise the cache only observes forward passes."""
    weight = next(model.parameters())
    kernels = choice.kernels_of(weight.device)
    shapes = ((layer.key_dim, layer.value_dim) for layer in geometry.layers)
    if kernels.attends(weight.dtype, weight.device) and all(kernels.supports_dims(*shape) for shape in shapes):
        try:
            bind(model)
            return True
        except UnsupportedModelError:
            pass
    watch(model)
    return False


class _Builder:
    """Makes the layers of one cache, and opens its checkpoint if it has one. entries: the budget of
    each layer. tail: its part for drafts, 0 where the method has none."""

    def __init__(
        self,
        request: Request,
        model: Any,
        geometry: ModelGeometry,
        meter: Meter,
        entries: int = 0,
        tail: int = 0,
    ) -> None:
        self.request, self.model, self.geometry, self.meter = request, model, geometry, meter
        self.method, self.device = request.method, next(model.parameters()).device
        fate = self.method.store_fate
        self.spec = request.spec(geometry, self.device.type) if self.method.checkpoints else None
        # The ledger records ids and positions if entries are rebuilt from them.
        records = fate.records or self.method.recall.records
        home, spec = None, self.spec
        if spec is not None and spec.where == "disk" and self.method.recall.endless and self.device.type == "cpu":
            home = place("disk", self.device, spec.folder)
        self.ledger = Ledger(records or (spec is not None and spec.kind != "kv"), home)
        self.shared = fate.shared(geometry, self.ledger)
        self.entries, self.tail = entries, tail
        self.checkpoint = None if self.spec is None else self._checkpoint(self.spec)
        in_order = layers_in_order(model) if geometry.recurrent_layers else set[int]()
        self.states = {
            layer.index: RecurrentState(layer.state_elements, in_order=layer.index in in_order)
            for layer in geometry.recurrent_layers
        }
        self.draft_passes = DraftPasses(tail, self.ledger, self.device, bind(model).latent) if tail else None
        shared = self.method.recall.shared(self.ledger, self.method.pin)
        self.recalled = shared if self.draft_passes is None else self.draft_passes

    def assembly(self, layers: list[Any], exact: bool) -> Assembly:
        """Return an assembly of ``layers``, with the objects that they share."""
        made = Assembly(layers, self.ledger, self.meter, self.device, exact, spec=self.spec, checkpoint=self.checkpoint)
        made = replace(made, states=self.states)
        return replace(made, latent=True) if exact and bind(self.model).latent else made

    def _checkpoint(self, spec: CheckpointSpec) -> Checkpoint:
        """Return the checkpoint. Raises UnsupportedModelError where it does not work with the model."""
        adapter, full = bind(self.model), [layer.index for layer in self.geometry.full_layers]
        home = place(spec.where, self.device, spec.folder)
        if spec.kind == "kv":
            endless = self.method.recall.endless
            if self.device.type == "cuda" and stages(spec, endless):
                entries = self.entries if self.method.selector.in_order else 0
                return StagedCheckpoint(home, self.device, self.geometry, spec, entries, self.request.page)
            return EntryCheckpoint(home, self.device, full, spec, self.meter, self.request.page, endless)
        if self.device.type == "cuda" and (price := price_of_residuals(spec, self.geometry)) is not None:
            warnings.warn(price, stacklevel=2)
        adapter.require("project", full, f"checkpoint kind '{spec}'")
        if spec.kind == "tokens" or spec.stride > 1:
            adapter.require("advance", full, f"checkpoint kind '{spec}'")
        return ResidualCheckpoint(
            adapter,
            self.ledger,
            home,
            self.geometry,
            spec,
            meter=self.meter,
            page=self.request.page,
        )

    def layer(self, layer: LayerGeometry, budgets: Sequence[int]) -> Layer:
        """Return a layer of parts. budgets: resident entries of its KV heads."""
        site = Site(
            layer=layer,
            geometry=self.geometry,
            model=self.model,
            entries=self.entries,
            budgets=budgets,
            readers=sum(reader.source == layer.index for reader in self.geometry.layers),
            first=layer.index == self.geometry.full_layers[0].index,
            ledger=self.ledger,
            meter=self.meter,
            device=self.device,
            checkpoint=self.checkpoint,
            pinned=self.method.reserved,
        )
        selector, store = self.method.selector, self.method.store_fate.store(site, self.shared)
        resident: Resident
        if selector.in_order:
            assert isinstance(store, InOrder)
            resident = Newest(site, store)
        else:
            resident = Selected(site, selector, store, self.tail, bind(self.model) if selector.ahead else None)
        return Layer(site, resident, store, self.method.recall.reader(site, self.recalled))

    def layers(self, full: Callable[[LayerGeometry], Any]) -> list[Any]:
        """Return the layers of a cache. ``full`` makes the full layers. Sliding windows and recurrent states are
        bounded already; layers that read another layer's entries hold none; transformers handles all other
        states."""
        stock = DynamicCache(config=self.model.config).layers
        drops = self.device.type == "cuda" and self.method.exactness is Exactness.LOSSY
        clock = self.ledger if drops or (self.draft_passes is not None and self.draft_passes.uniform) else None
        layers = [
            full(layer)
            if layer.kind == "full"
            else SlidingLayer(layer.window, clock, drops)
            if layer.kind == "sliding" and layer.window is not None
            else self.states[layer.index]
            if layer.index in self.states
            else stock[layer.index]
            for layer in self.geometry.layers
        ]
        if (passes := self.draft_passes) is not None:
            passes.layers = [layers[layer.index] for layer in self.geometry.full_layers]
            passes.windows = [layers[layer.index] for layer in self.geometry.sliding_layers]
            passes.states = self.states
        return layers


def _positions(model: Any, geometry: ModelGeometry, sinks: int, entries: int, chunk: int) -> CachePositions:
    """Return positions within the cache. Raises UnsupportedModelError where keys cannot be rotated, and BudgetError
    where the cache is longer than the model's positions."""
    adapter, limit = bind(model), geometry.max_positions
    full = [layer.index for layer in geometry.full_layers]
    adapter.require("turn", full, "positions within the cache", "use streaming-llm:positions=absolute")
    if limit is not None and entries + chunk > limit:
        raise BudgetError(
            f"A cache of {entries} entries and a chunk of {chunk} need more positions than the model's {limit}; "
            "give a smaller budget, or use streaming-llm:positions=absolute."
        )
    return CachePositions(adapter, min(sinks, entries), entries, limit or 2**15)
