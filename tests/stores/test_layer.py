"""A layer's attention in one call of the kernel: what it gives, and what is learnt of it, is what segments give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, tiny
from helpers import assert_near, bounded, prompt, step
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache
from kvkeep.stores.layer import Layer

METHODS = [
    ("window", 40),
    ("h2o", 40),
    ("kv-direct", 40),
    ("quantized:8", 200),
    ("snapkv+quantize:4", 120),
    ("revive", 100),
]
CHECKPOINTED = ("kv-direct", "h2o+checkpoint")
pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(("spec", "budget"), METHODS)
def test_one_call_gives_what_segments_give(spec: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = FAMILIES["llama"]()
    config.head_dim = 16  # of codes the kernel reads whole vectors
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    options: dict[str, Any] = {"checkpoint": "kv"} if spec == "kv-direct" else {}
    calls: list[bool] = []
    own = Layer.attended_at_once

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        cache = KeepCache(model, spec, budget, chunk=32, **options)
        ids = prompt(1, 200, seed=4)
        given = [step(model, cache, part) for part in ids[:, :130].split(32, 1)]
        given += [step(model, cache, token) for token in ids[:, 130:170].split(1, 1)]
        cache.reorder_cache(torch.tensor([0]))  # everything lies elsewhere now
        given += [step(model, cache, token) for token in ids[:, 170:].split(1, 1)]
        states = {f"{layer.index}.{key}": part for layer in bounded(cache) for key, part in layer.state().items()}
        for layer in bounded(cache):  # what is described to the kernel is what is counted, and no copy beside it
            parts = list(getattr(layer.evicted, "_described", None) or [])
            parts += [bank.table for bank in getattr(layer.resident, "banks", ()) if bank.table is not None]
            own = {part.untyped_storage().data_ptr() for part in layer.state().values()}
            assert all(one.untyped_storage().data_ptr() in own for part in parts for one in part._held)
        return torch.cat(given, 1).float(), states

    def counted(layer: Layer, *given: Any, **more: Any) -> Any:
        found = own(layer, *given, **more)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(Layer, "attended_at_once", counted)
    at_once, states = run()
    assert all(calls) and len(calls) == 70 * len(model.model.layers)
    monkeypatch.setattr(Layer, "attended_at_once", lambda *given, **more: None)
    by_segments, others = run()
    assert_near(at_once, by_segments, 0.05)
    assert states.keys() == others.keys()


@pytest.mark.parametrize("spec", CHECKPOINTED)
def test_a_past_that_is_described_to_the_kernel_is_handed_on(spec: str) -> None:
    """In bfloat16, where a checkpoint's pages are one segment and no tensor."""
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]()).bfloat16().eval()
    caches = KeepCache(model, spec, 16, chunk=32, checkpoint="kv"), KeepCache(model)
    for cache in caches:
        step(model, cache, prompt(1, 200, seed=4))
    for own, other in zip(caches[0].fork("full").layers, caches[1].layers, strict=True):
        assert_near(own.keys.float(), other.keys.float(), 0.05)
        assert_near(own.values.float(), other.values.float(), 0.05)


def test_a_bank_that_was_not_full_gives_no_empty_places() -> None:
    """What leaves are entries, so a store of few groups has room for as many of them."""
    cache = KeepCache(tiny("llama"), "h2o+quantize:8", 120, chunk=32)
    for part in prompt(1, 190, seed=5).split(32, 1):
        step("llama", cache, part)
    for layer in bounded(cache):
        store = layer.evicted
        assert store.slots is not None and not store.holes and bool((store.slots[:, : store.held] >= 0).all())
