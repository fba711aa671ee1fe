"""The minimum time of a step: bytes counted by hand, and properties of every cache."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from families import tiny
from helpers import prompt, step
from kvkeep_lab import limits
from kvkeep_lab.limits import entry_bytes, memory_rate, step_limit_ms, weight_bytes
from torch import nn

from kvkeep.policies.names import STOCK
from kvkeep.stock import memory_of, new_cache

TOKEN = 4 * 2 * 2 * 8 * 4
"""Bytes of a token's keys and values in the tiny Llama: layers, keys and values, heads, width, float32."""

METHODS = {
    STOCK: {},
    "full": {},
    "static": {"budget": "100"},
    "kv-direct": {"budget": "32", "where": "disk"},
    "window": {"budget": "32"},
    "h2o": {"budget": "32"},
    "quantized:4": {"budget": "77"},
}


def after(method: str, tokens: int, rows: int = 1) -> int:
    cache = new_cache(tiny("llama"), method, **METHODS[method])
    step("llama", cache, prompt(rows, tokens - 1))
    step("llama", cache, prompt(rows, tokens)[:, -1:])
    memory = memory_of(cache)
    counted = entry_bytes(cache, tokens, rows)
    assert method == "kv-direct" or counted <= memory.resident_bytes + memory.compressed_bytes
    return counted


@pytest.mark.parametrize("method", METHODS)
def test_more_tokens_and_rows_are_never_fewer_bytes(method: str) -> None:
    counted = [after(method, tokens) for tokens in (20, 50, 80)]
    assert 0 < counted[0] <= counted[1] <= counted[2]
    assert all(size <= length * TOKEN for size, length in zip(counted, (20, 50, 80), strict=True))
    assert after(method, 50, rows=3) == 3 * counted[1]


def test_exact_caches_read_every_token_and_a_window_only_its_entries() -> None:
    assert {after(method, 80) for method in (STOCK, "full", "static", "kv-direct")} == {80 * TOKEN}
    assert after("window", 80) == after("window", 50) == 32 * TOKEN
    assert after("quantized:4", 80) < 80 * TOKEN


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_counts_only_if_the_head_shares_it(tied: bool) -> None:
    model = deepcopy(tiny("llama"))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head.weight = embedding.weight if tied else nn.Parameter(embedding.weight.detach().clone())
    named = dict(model.named_parameters(remove_duplicate=True)) | dict(model.named_buffers())
    every = sum(part.nbytes for part in named.values())
    assert weight_bytes(model) == every - (0 if tied else embedding.weight.nbytes)


def test_buffers_count_and_experts_are_not_estimated() -> None:
    model = deepcopy(tiny("llama"))
    before = weight_bytes(model)
    assert before is not None
    model.model.layers[0].register_buffer("codes", torch.zeros(100, dtype=torch.uint8))
    assert weight_bytes(model) == before + 100
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(2, 2)])
    assert weight_bytes(model) is None


def test_the_step_limit_is_bytes_over_bandwidth() -> None:
    assert step_limit_ms(3_000_000, 1_000_000, 1e9) == pytest.approx(4.0)
    assert step_limit_ms(None, 1, 1e9) is None and step_limit_ms(1, None, 1e9) is None
    assert step_limit_ms(1, 1, None) is None


def test_the_memory_rate_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RATE_BYTES", 1 << 20)
    ticks = iter(range(10_000))
    monkeypatch.setattr(limits.time, "perf_counter", lambda: float(next(ticks)))
    assert memory_rate(torch.device("cpu")) == 1 << 20  # a second each
