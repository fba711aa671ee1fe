"""Prompts that are read at once and compressed then: what is attended, what is held meanwhile, what is refused."""

from __future__ import annotations

import pytest
import torch
from families import tiny
from helpers import assert_near, bounded, expected, prompt, step

from kvkeep import KeepCache, UsageError
from kvkeep.plan.sizes import sizes
from kvkeep.policies.methods import resolve

METHODS = (
    "h2o",
    "tova",
    "streaming-llm",
    "quantized:exact=10",
    "kvreviver",
    "h2o+merge",
    "kvslimmer:sinks=2",
    "snapkv",
)
LENGTH, BUDGET = 170, 60


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_is_read_as_by_the_unbounded_cache_and_then_held_within_the_budget(method: str) -> None:
    """Every position's logits are the unbounded cache's; in chunks they are not. Afterwards the budget holds, and the
    peak is what is held then, with the whole prompt of one layer."""
    ids, cache = prompt(1, LENGTH), KeepCache(tiny("llama"), f"{method}+oneshot", BUDGET)
    assert_near(step("llama", cache, ids, logits_to_keep=0), expected("llama", ids))
    chunked = step("llama", KeepCache(tiny("llama"), method, BUDGET), ids, logits_to_keep=0)
    assert (chunked - expected("llama", ids)).abs().max() > 1e-2
    memory, token = cache.memory(), cache.geometry.full_bytes_per_token
    held = memory.resident_bytes + memory.compressed_bytes
    assert held <= BUDGET * token
    assert memory.peak_cache_bytes == held + LENGTH * token // len(cache.geometry.layers)
    assert all("one layer at a time holds all of it" in layer.note for layer in cache.describe())
    for place in range(4):
        assert step("llama", cache, ids[:, place : place + 1]).isfinite().all()
        assert all(layer.resident.nbytes <= BUDGET * token // len(cache.geometry.layers) for layer in bounded(cache))


def test_heavy_hitters_of_a_prompt_read_at_once_are_those_of_its_whole_attention() -> None:
    """By the matrix of weights that transformers' own eager attention returns: the sum over all queries, mean over the
    query heads of a KV head."""
    from copy import deepcopy

    ids, cache = prompt(1, 90), KeepCache(tiny("llama"), "h2o:recent=0.25+oneshot", 24)
    step("llama", cache, ids)
    eager = deepcopy(tiny("llama"))
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = eager(ids, output_attentions=True).attentions
    for layer, matrix in zip(bounded(cache), matrices, strict=True):
        by_head = matrix[0].sum(1).unflatten(0, (layer.heads, -1)).mean(1)  # (kv_heads, slots)
        by_head[:, -6:] = float("inf")
        wanted = by_head.topk(24, dim=1).indices.sort(1).values
        held = layer.resident.resident_slots()
        assert [own.nonzero().flatten().tolist() for own in held] == wanted.tolist()


def test_the_planner_counts_the_whole_prompt() -> None:
    geometry = KeepCache(tiny("llama"), "h2o", BUDGET).geometry
    whole, chunked = (sizes(geometry, resolve(name), LENGTH, BUDGET) for name in ("h2o+oneshot", "h2o"))
    entry = geometry.full_bytes_per_token // len(geometry.layers)
    assert (whole.chunk_bytes, chunked.chunk_bytes) == (LENGTH * entry, BUDGET * entry)
    assert whole.resident == chunked.resident


def test_what_it_does_not_go_with_is_said() -> None:
    for text, words in (
        ("full+oneshot", "evicts nothing, so there is nothing to compress"),
        ("kvzip+oneshot", "always reads the whole text before it compresses"),
        ("kvslimmer-published+oneshot", "the prompt has only one chunk"),
        ("h2o+oneshot+verified", "Unknown fate 'oneshot'"),
        ("h2o+oneshot:3", "Unknown fate 'oneshot'"),
    ):
        with pytest.raises(UsageError, match=words):
            KeepCache(tiny("llama"), text, BUDGET)
    with pytest.raises(UsageError, match=r"'h2o\+oneshot' takes no chunk"):
        KeepCache(tiny("llama"), "h2o+oneshot", BUDGET, chunk=16)
    limit = tiny("llama").config.max_position_embeddings
    cache = KeepCache(tiny("llama"), "streaming-llm+oneshot", 16)
    with pytest.raises(UsageError, match=f"need {limit + 1} positions, more than the model's {limit}"):
        step("llama", cache, prompt(1, limit + 1))
    assert step("llama", cache, prompt(1, 60)).isfinite().all()
