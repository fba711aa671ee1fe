"""The methods by name: who leaves, what becomes of it, how it comes back, and what that promises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from transformers import DynamicCache

from kvkeep.budget import Budget
from kvkeep.errors import UnsupportedModelError, UsageError, unknown
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.stores.bounded import BoundedLayer
from kvkeep.stores.checkpoints import Checkpoint, CheckpointSpec, Entries, Residuals
from kvkeep.stores.grown import GrownLayer
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.paged import BlockPool, BlockTable, PagedLayer
from kvkeep.stores.places import Device, place


class Exactness(StrEnum):
    """What a method promises about its output."""

    EXACT = "exact"  # token for token the unbounded cache's
    REVERSIBLE = "reversible"  # what left can come back, approximately
    LOSSY = "lossy"  # what left is gone


@dataclass(frozen=True)
class Request:
    """Everything a cache was asked for. ``budget`` None: none."""

    model: Any
    geometry: ModelGeometry
    budget: Budget | None
    checkpoint: str | None
    where: str | None
    capacity: int | None
    folder: str | None
    chunk: int | None
    page: int
    context: int | None
    batch: int

    @property
    def device(self) -> torch.device:
        """The device the model runs on."""
        return next(self.model.parameters()).device


@dataclass(frozen=True)
class Plan:
    """What a method made of a request: the layers, and what they share. ``entries``: the effective budget of each
    full layer; ``chunk``: tokens of a prompt taken at a time; ``streams``: attention adds the past itself."""

    layers: list[Any]
    entries: int | None = None
    chunk: int = 0
    streams: bool = False
    spec: CheckpointSpec | None = None
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class Method:
    """One row of the table selector × fate × recall."""

    name: str
    selector: str
    fate: str
    recall: str
    exactness: Exactness
    summary: str
    source: str
    options: tuple[str, ...]
    plan: Callable[[Request, Ledger, Meter], Plan]


def _stock_layers(request: Request, replace: Callable[[LayerGeometry], Any]) -> list[Any]:
    """Return transformers' own layers with the full ones replaced: sliding windows are bounded already, and
    layers that read another layer's entries hold none."""
    stock = DynamicCache(config=request.model.config).layers
    return [replace(layer) if layer.kind == "full" else stock[layer.index] for layer in request.geometry.layers]


def _refuse(request: Request, method: str, *options: str) -> None:
    for option in options:
        if getattr(request, option) is not None:
            raise UsageError(f"Method '{method}' takes no {option}; 'kv-direct' does.")


def _full(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    _refuse(request, "full", "budget", "checkpoint", "where", "capacity", "folder", "chunk")
    return Plan(_stock_layers(request, lambda layer: GrownLayer()))


def _static(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    _refuse(request, "static", "checkpoint", "where", "capacity", "folder", "chunk")
    if request.budget is None:
        raise UsageError("Method 'static' needs a budget: the most entries it will ever hold (budget=4096).")
    limit = request.budget.entries(request.geometry, context=request.context, batch=request.batch)
    return Plan(_stock_layers(request, lambda layer: GrownLayer(limit=limit)), entries=limit)


def _paged(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    _refuse(request, "paged", "budget", "checkpoint", "where", "capacity", "folder", "chunk")
    bind(request.model)
    table = BlockTable(BlockPool())
    first = next((layer.index for layer in request.geometry.layers if layer.kind == "full"), 0)
    layers = _stock_layers(request, lambda layer: PagedLayer(table, meter, request.page, leads=layer.index == first))
    return Plan(layers, chunk=sys.maxsize, streams=True)


def _kv_direct(request: Request, ledger: Ledger, meter: Meter) -> Plan:
    geometry = request.geometry
    if request.budget is None:
        raise UsageError("Method 'kv-direct' needs a budget: entries (512), bytes (64MB), a share (25%), or 0.")
    for layer in geometry.layers:
        if layer.kind not in ("full", "sliding", "shared"):
            raise UnsupportedModelError(
                f"'{geometry.model_type}' has a '{layer.kind}' layer (layer {layer.index}), whose state is not keys "
                "and values that could be rebuilt; use method 'full'."
            )
    entries = request.budget.entries(geometry, context=request.context, batch=request.batch, chunk=request.chunk)
    chunk = request.budget.chunk_for(entries, request.chunk)
    spec = _spec(request)
    adapter = bind(request.model)
    full = [layer.index for layer in geometry.layers if layer.kind == "full"]
    checkpoint: Checkpoint
    home = place(spec.where, request.device, spec.folder)
    if spec.kind == "kv":
        checkpoint = Entries(home, request.device, full, spec, meter, request.page)
    else:
        adapter.require("project", full, f"checkpoint kind '{spec}'")
        if spec.kind == "tokens" or spec.stride > 1:
            adapter.require("advance", full, f"checkpoint kind '{spec}'")
        checkpoint = Residuals(adapter, ledger, home, geometry, spec, meter, request.page)
    resident = Device(request.device)
    layers = _stock_layers(request, lambda layer: BoundedLayer(layer.index, entries, resident, checkpoint))
    return Plan(layers, entries, chunk, True, spec, checkpoint)


def _spec(request: Request) -> CheckpointSpec:
    """Fill in the defaults: the smaller of kv and residual, outside the memory the model runs in."""
    geometry = request.geometry
    kind = request.checkpoint
    if kind is None:
        vectors, entries = (geometry.checkpoint_bytes_per_token(name) for name in ("residual", "kv"))
        kind = "residual" if vectors < entries else "kv"
    where = request.where or ("disk" if request.device.type == "cpu" else "host")
    return CheckpointSpec.parse(kind, where, capacity=request.capacity, folder=request.folder)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
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
}


def resolve(name: str) -> Method:
    """Return the method called ``name``; raises UsageError with the near matches."""
    if name not in METHODS:
        raise unknown("method", name, [*METHODS, "stock"])
    return METHODS[name]
