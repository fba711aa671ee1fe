"""One layer by itself: of a selector and a fate, with random queries, keys and values instead of a model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from families import tiny
from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import Site
from kvkeep.contracts.selector import Selector
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.stores.layer import Layer, ReadEvicted
from kvkeep.stores.resident.selected import Selected


def site(kv_heads: int, dim: int, entries: int) -> Site:
    """The first layer of a cache of one page, with so many KV heads."""
    model = tiny("llama")
    own, whole = LayerGeometry(0, "full", kv_heads, dim, dim, None, 0), ModelGeometry.from_config(model.config)
    ledger, device = Ledger(), torch.device("cpu")
    return Site(own, whole, model, entries, (entries,), 1, True, ledger, Meter(), device, None)


def layer_of(selector: Selector, fate: Fate, kv_heads: int, dim: int, entries: int, store: Any = None) -> Layer:
    """A layer with room for so many entries; ``store``: instead of the one that ``fate`` makes of such a budget."""
    where = site(kv_heads, dim, entries)
    store = fate.store(where, fate.shared(where.geometry, where.ledger)) if store is None else store(where)
    return Layer(where, Selected(where, selector, store), store, ReadEvicted())


def attended(layer: Layer, query: Tensor, key: Tensor, value: Tensor, scaling: float = 1.0) -> Tensor:
    """Return a layer's attention for the next tokens, (batch, heads, n, dim), as query; key and value of KV heads."""
    layer.ledger.append(torch.zeros(key.shape[0], key.shape[2], dtype=torch.int64), None, None, None)
    layer.update(key, value)
    step = AttentionInputs.of(SimpleNamespace(), query, key, value, None, scaling, key.shape[1], True, True)
    return step.unfolded(layer.reader.attend(layer, step))


def greedy(cost: list[float], wanted: int) -> list[int]:
    """Return the places of the cheapest pairs of neighbours, no two of which share an entry; never one of cost inf."""
    taken: list[int] = []
    for place in sorted(range(len(cost)), key=lambda place: (cost[place], place)):
        if math.isfinite(cost[place]) and len(taken) < wanted and not {place - 1, place, place + 1} & set(taken):
            taken.append(place)
    return sorted(taken)
