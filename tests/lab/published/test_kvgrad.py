"""KVgrad: its scores against transformers and autograd, and what it refuses."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tokenizer
from families import tiny
from helpers import assert_near, padded, prompt, step
from torch.linalg import vector_norm

from kvkeep import KeepCache, UnsupportedModelError, load


def scores_by_autograd(model: Any, text: torch.Tensor, kv_heads: int) -> list[torch.Tensor]:
    """Return the scores of each layer's entries by one pass over the text and its repetition, (KV heads, tokens)."""
    model, tokens = deepcopy(model), text.shape[1]
    residuals: list[torch.Tensor] = []
    ends: list[torch.Tensor] = []
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: residuals.append(args[0]))
    model.model.layers[-1].register_forward_hook(lambda module, args, output: ends.append(output))
    output = model(torch.cat([text, text], 1), output_attentions=True, use_cache=True)
    gradients = torch.autograd.grad(ends[0][:, tokens:].square().sum(), residuals)
    found = []
    for number, layer in enumerate(model.model.layers):
        weights = output.attentions[number][0, :, tokens:, :tokens].unflatten(0, (kv_heads, -1))
        matrix = layer.self_attn.o_proj.weight.unflatten(1, (kv_heads, weights.shape[1], -1))
        values = output.past_key_values.layers[number].values[0, :, :tokens]
        written = vector_norm(torch.einsum("ktd,okgd->kgto", values, matrix), dim=3)  # (KV heads, heads, tokens)
        slopes = vector_norm(gradients[number][0, tokens:], dim=1)
        found.append((weights * written[:, :, None] * slopes[:, None]).amax((1, 2)).detach())
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "qwen3_moe"])
def test_scores_are_those_of_autograd(family: str) -> None:
    text, cache = prompt(1, 32), KeepCache(tiny(family), "kvgrad:sinks=0", 32, chunk=7)
    step(tiny(family), cache, text)
    found = cache.fork("kvgrad:sinks=0", 16).compress()
    assert found is not None
    theirs = scores_by_autograd(tiny(family), text, cache.geometry.full_layers[0].kv_heads)
    for ours, other in zip(found, theirs, strict=True):
        assert_near(ours.scores, other)
    assert max(float(ours.scores.max()) for ours in found) > 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # gemma2 has windows, and its scores are capped
def test_padding_of_another_row_changes_no_choice(family: str) -> None:
    ids, mask = padded([23, 32])
    caches = [KeepCache(tiny(family), "kvgrad:sinks=0", 16) for _ in range(2)]
    step(tiny(family), caches[0], ids, mask)
    step(tiny(family), caches[1], ids[1:])
    for both, alone in zip(*(cache.stream.bounded for cache in caches), strict=True):
        kept = both.resident.resident_slots()[both.heads :]
        assert torch.equal(kept, alone.resident.resident_slots())


def test_a_reading_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")

    def state() -> list[Any]:
        hooks = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()]
        return [*hooks, *(one.requires_grad for one in model.parameters()), *(one.grad for one in model.parameters())]

    cache = KeepCache(model, "kvgrad", 16)
    before = state()
    with torch.inference_mode():
        step(model, cache, prompt(1, 32))
    assert not cache.reading and state() == before


def test_packed_weights_and_unknown_layers_are_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="packed weights.*weights float32, or use kvzip"):
        KeepCache(load(tmp_path, weights="bfloat16", device="cpu").model, "kvgrad", 16)
    with pytest.raises(UnsupportedModelError, match="'kvgrad' does not find the parts of a layer of 'gpt2'.*use kvzip"):
        KeepCache(tiny("gpt2"), "kvgrad", 16)
