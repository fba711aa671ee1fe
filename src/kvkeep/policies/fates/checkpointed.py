"""``checkpoint``: what leaves is kept in a form from which exact keys and values come back (KV-Direct)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.models.binding import bind
from kvkeep.policies.fates.base import Fate
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.checkpoints import Checkpoint, CheckpointSpec, Entries, Residuals
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.places import Device, place
from kvkeep.stores.rows import Buffer, Ring, concatenated
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


@dataclass(frozen=True)
class Checkpointed(Fate):
    """``kind``: kv, residual, residual:STRIDE or tokens; by default what the cache's ``checkpoint`` says."""

    kind: str = ""

    label: ClassVar[str] = "checkpointed"
    recall: ClassVar[str] = "all pages, exact"
    exactness: ClassVar[Exactness] = Exactness.EXACT
    options: ClassVar[tuple[str, ...]] = ("checkpoint", "where", "capacity", "folder", "page")
    records: ClassVar[bool] = True

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return checkpoints for entries that leave in any order."""
        spec, checkpoint = checkpoint_for(replace(request, checkpoint=self.kind or request.checkpoint), ledger, meter)
        return _Checkpointed(spec, checkpoint, request.device)

    def checkpoint(self, live: LiveFate) -> tuple[CheckpointSpec | None, Checkpoint | None]:
        """Return it."""
        assert isinstance(live, _Checkpointed)
        return live.spec, live.checkpoint


def checkpoint_for(request: Request, ledger: Ledger, meter: Meter) -> tuple[CheckpointSpec, Checkpoint]:
    """Return the checkpoint a cache asked for. Raises UnsupportedModelError where the model cannot be rebuilt so."""
    geometry, spec = request.geometry, _spec(request)
    adapter = bind(request.model)
    full = [layer.index for layer in geometry.layers if layer.kind == "full"]
    home = place(spec.where, request.device, spec.folder)
    if spec.kind == "kv":
        return spec, Entries(home, request.device, full, spec, meter, request.page)
    adapter.require("project", full, f"checkpoint kind '{spec}'")
    if spec.kind == "tokens" or spec.stride > 1:
        adapter.require("advance", full, f"checkpoint kind '{spec}'")
    return spec, Residuals(adapter, ledger, home, geometry, spec, meter, request.page)


def _spec(request: Request) -> CheckpointSpec:
    """Fill in the defaults: the smaller of kv and residual, outside the memory the model runs in."""
    kind = request.checkpoint
    if kind is None:
        vectors, entries = (request.geometry.checkpoint_bytes_per_token(name) for name in ("residual", "kv"))
        kind = "residual" if vectors < entries else "kv"
    where = request.where or ("disk" if request.device.type == "cpu" else "host")
    return CheckpointSpec.parse(kind, where, capacity=request.capacity, folder=request.folder)


class _Checkpointed:
    """Entries leave in any order and every head's are others, so the slots of what is kept are kept beside it; where
    all tokens can be rebuilt (residuals), what is still resident is masked instead."""

    forgets = False
    compressed_bytes = 0

    def __init__(self, spec: CheckpointSpec, checkpoint: Checkpoint, device: torch.device) -> None:
        self.spec, self.checkpoint, self.device = spec, checkpoint, device
        self.moves = isinstance(checkpoint, Entries)
        self._slots: dict[int, Buffer | Ring] = {}
        self._left: set[int] = set()  # layers that something has left

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        self._left.add(layer)
        if not self.moves:
            return
        if layer not in self._slots:
            self._slots[layer] = self._new_rows()
        self.checkpoint.evict(layer, keys, values)
        self._slots[layer].append(slots[..., None].int())

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Tensor, Tensor]]:
        if layer.index not in self._left:
            return
        if self.moves:
            kept = self._slots[layer.index]
            pieces = self.checkpoint.recall(layer.index, kept.length)
        else:
            away = torch.arange(layer.length, device=self.device).masked_fill(layer.held(), -1)
            pieces = self.checkpoint.recall(layer.index, layer.length)
        for start, keys, values in pieces:
            stop = start + keys.shape[-2]
            slots = concatenated(kept, start, stop).flatten(0, 1).squeeze(-1) if self.moves else away[:, start:stop]
            yield slots, True, keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]

    def whereabouts(self, layer: SelectedLayer, length: int) -> Tensor:
        codes = torch.full((layer.rows, layer.heads, length), Whereabouts.CHECKPOINTED)
        lost = next((rows.first for _, rows in self.checkpoint.stores()), 0)
        if lost and not self.moves:
            codes[..., :lost] = Whereabouts.DROPPED
        elif lost:
            kept = self._slots[layer.index]
            slots = concatenated(kept, kept.first, kept.length).squeeze(-1).long()
            held = torch.zeros(*codes.shape[:2], length + 1, dtype=torch.bool, device=slots.device)
            held.scatter_(2, slots.masked_fill(slots < 0, length), True)
            codes.masked_fill_(~held[..., :length].cpu(), Whereabouts.DROPPED)
        return codes

    def truncate(self, length: int) -> None:
        """Leave holes where slots are forgotten."""
        for rows in self._slots.values():
            for _, piece in rows.read(rows.first, rows.length):
                piece.masked_fill_(piece >= length, -1)
        if not self.moves:
            self.checkpoint.truncate(length, ())

    def select(self, index: Tensor) -> None:
        for rows in self._slots.values():
            rows.select(index)

    def state(self) -> dict[str, Tensor]:
        saved = {
            f"fate.{layer}": concatenated(rows, rows.first, rows.length)
            for layer, rows in self._slots.items()
            if rows.first < rows.length
        }
        return saved | {"fate.left": torch.tensor(sorted(self._left), dtype=torch.int32)}

    def restore(self, state: dict[str, Tensor]) -> None:
        self._left = set(state["fate.left"].tolist())
        for layer in self._left if self.moves else ():
            self._slots[layer] = rows = self._new_rows()
            if (kept := state.get(f"fate.{layer}")) is not None:
                stores = dict(self.checkpoint.stores())
                rows.first = rows.length = stores[f"keys.{layer}"].first
                rows.append(kept)

    def _new_rows(self) -> Buffer | Ring:
        capacity = self.spec.capacity
        return Buffer() if capacity is None else Ring(capacity, Device(self.device))

    @property
    def bookkeeping_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._slots.values())
