"""The adapter rebuilds what the model caches, and refuses families by name where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, LAYOUTS, tiny
from transformers import AutoModelForCausalLM, DynamicCache

from kvkeep import KeepCache, UnsupportedModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep.models.forward import attending, current_attender, probing


def observe(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], DynamicCache]:
    entering: list[torch.Tensor] = []
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), probing(lambda index, hidden: entering.append(hidden)):
        model(ids, cache=cache)
    return entering, cache


@pytest.mark.parametrize("family", FAMILIES)
def test_rebuilt_entries_equal_the_cached_ones_bit_for_bit(family: str) -> None:
    """KV-Direct, Table 2: if shapes are those of the forward pass."""
    model = tiny(family)
    adapter, ids = bind(model), torch.arange(2, 8).unsqueeze(0)
    entering, cache = observe(model, ids)
    rebuilt = []
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is None or family == "gemma4":
            continue
        with torch.no_grad():
            keys, values = adapter._project_by_layer(index, entering[index], torch.arange(6).unsqueeze(0))
        assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)
        rebuilt.append(index)
    full = [layer.index for layer in ModelGeometry.from_config(model.config).layers if layer.owns_entries]
    assert rebuilt == full or family == "gemma4"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "gpt2", "deepseek_v3"])
def test_direct_projection_is_used_where_it_gives_the_same_entries(family: str) -> None:
    assert bind(tiny(family))._direct == (family in ("llama", "qwen3", "gemma3"))


def test_a_family_whose_entries_differ_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen2")
    adapter = bind(model)
    monkeypatch.setattr(adapter, "_checked", {})
    honest = Adapter.project
    monkeypatch.setattr(
        Adapter, "project", lambda self, index, *rest: tuple(1.01 * part for part in honest(self, index, *rest))
    )
    with pytest.raises(UnsupportedModelError, match="'qwen2'.*layer 0 differ.*'kv'"):
        KeepCache(model, "kv-direct", 16, checkpoint="residual", where="host")


@torch.no_grad()
def test_layers_that_call_their_cache_otherwise_are_rebuilt() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LAYOUTS["gpt_neox"]()).eval()
    adapter, ids = bind(model), torch.arange(2, 42).unsqueeze(0)
    for capability in ("project", "advance", "turn"):
        adapter.require(capability, [0, 1, 2, 3], "this test")
    found = []
    ways: tuple[dict[str, Any], ...] = ({}, {"budget": 16, "checkpoint": "residual", "where": "host"})
    for options in ways:
        cache = KeepCache(model, "kv-direct" if options else "full", **options)
        found.append(torch.cat([model(part, cache=cache).logits for part in ids.split((30, 1, 9), 1)], 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_an_attender_is_set_within_its_context_only() -> None:
    marker: Any = object()
    with attending(marker):
        assert current_attender() is marker
    assert current_attender() is None
