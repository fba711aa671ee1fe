"""Attention Matching: its fit against NumPy and where the answer is known, and what it does to a cache."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny
from helpers import assert_near, bounded, prompt, slots_of, step
from kvkeep_lab.published.attention_matching import (
    BOUNDS,
    STEPS,
    AttentionMatching,
    Matched,
    TextAndQueries,
    least_squares,
    matched,
)
from kvkeep_lab.published.highest_attention import HighestAttention

from kvkeep import KeepCache, UnsupportedModelError, UsageError


def test_entries_that_are_alike_become_one_with_their_count_and_mean_value() -> None:
    """Six keys, each there up to four times with other values: attention over one of each can be the same."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.tensor([0, 1, 2, 3, 4, 5, 1, 2, 2, 5, 5, 5])
    keys = torch.randn(6, 8, generator=generator)[kinds]
    values = torch.randn(12, 4, generator=generator)
    queries = torch.randn(200, 8, generator=generator)
    weights, fitted = matched(queries @ keys.T, values, torch.arange(6), 0.0)
    assert_near(weights, torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 4.0]))
    assert_near(fitted, torch.stack([values[kinds == kind].mean(0) for kind in range(6)]))


def test_the_fit_is_the_authors_by_numpy() -> None:
    """The solution of least squares clamped, then steps of projected gradient descent; least squares for values."""
    generator = np.random.default_rng(2)
    queries, keys, values = (generator.normal(size=shape) for shape in ((300, 6), (40, 6), (40, 5)))
    scores, chosen = queries @ keys.T, np.sort(generator.permutation(40)[:10])
    masses = np.exp(scores - scores.max(1, keepdims=True))
    design, total = masses[:, chosen], masses.sum(1)
    weights = np.clip(np.linalg.lstsq(design, total, rcond=None)[0], *BOUNDS)
    for _ in range(STEPS):
        slope = design.T @ (design @ weights - total)
        weights = np.clip(weights - slope / np.linalg.norm(design, 2) ** 2, *BOUNDS)
    attention = design * weights
    attention /= attention.sum(1, keepdims=True)
    fitted = np.linalg.lstsq(attention, masses / total[:, None] @ values, rcond=None)[0]
    ours = matched(*(torch.tensor(part, dtype=torch.float32) for part in (scores, values)), torch.tensor(chosen), 0.0)
    np.testing.assert_allclose(ours[0], weights, rtol=0.02)  # the norm is of three steps of power iteration
    np.testing.assert_allclose(ours[1], fitted, rtol=0.05, atol=0.05)


def test_a_ridge_holds_values_to_the_original_ones() -> None:
    """As in NumPy, by rows that ask for no change; the more ridge, the less change."""
    generator = np.random.default_rng(3)
    design, target = generator.normal(size=(50, 8)), generator.normal(size=(50, 3))
    for ridge in (1e-3, 1e-1):
        rows = math.sqrt(ridge) * np.linalg.norm(design, 2) * np.eye(8)
        wanted = np.linalg.lstsq(np.concatenate([design, rows]), np.pad(target, ((0, 8), (0, 0))), rcond=None)[0]
        found = least_squares(torch.tensor(design), torch.tensor(target), ridge)
        np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.01)
    scores, values = torch.randn(80, 20), torch.randn(20, 4)
    changes = [(matched(scores, values, torch.arange(5), ridge)[1] - values[:5]).norm() for ridge in (1e-6, 1e-2, 1e4)]
    assert changes == sorted(changes, reverse=True) and changes[-1] < 1e-3


def slow(family: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """The scores from transformers' own eager attention over text and repetition."""
    model = deepcopy(tiny(family))
    model.set_attn_implementation("eager")
    length = ids.shape[1]
    with torch.no_grad():
        attentions = model(torch.cat([ids, ids], 1), output_attentions=True, use_cache=False).attentions
    scores = []
    for layer in KeepCache(model, "full").geometry.full_layers:
        weights = attentions[layer.index][0][:, length:, :length]  # (heads, queries, text)
        squares = (weights / weights.sum(2, keepdim=True)) ** 2
        scores.append(squares.unflatten(0, (layer.kv_heads, -1)).mean((1, 2)).sqrt())
    return scores


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt2"])
def test_scores_are_roots_of_mean_squares_over_the_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    monkeypatch.setattr(
        HighestAttention, "shares", lambda self, scores, rows, n: found.extend(scores) or [[n]] * len(scores)
    )
    step(family, KeepCache(tiny(family), "highest-attention:sinks=0", 16, chunk=7), prompt(1, 30))
    for ours, theirs in zip(found, slow(family, prompt(1, 30)), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("rows", [1, 2])
def test_attention_of_the_queries_comes_nearer_to_that_of_the_text(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[tuple[float, float]] = []
    fit = Matched.fit

    def error(text: TextAndQueries, resident: Any, lane: int) -> float:
        (bank,) = resident.banks
        queries = text.queries[lane] * text.scaling
        output = (queries @ text.keys[lane].T).softmax(1) @ text.values[lane]
        bias = 0 if bank.extra is None else bank.extra[lane].log1p()
        ours = (queries @ bank.keys[lane].T + bias).softmax(1) @ bank.values[lane]
        return float((ours - output).square().mean())

    def fitted(self: Matched, text: TextAndQueries, resident: Any) -> None:
        before = [error(text, resident, lane) for lane in range(len(text.keys))]
        fit(self, text, resident)
        errors.extend(zip(before, (error(text, resident, lane) for lane in range(len(text.keys))), strict=True))
        (bank,) = resident.banks
        assert bank.extra is not None and math.exp(-3) - 1 <= bank.extra.min() and bank.extra.max() <= math.exp(3) - 1

    monkeypatch.setattr(Matched, "fit", fitted)
    cache = KeepCache(tiny("llama"), "attention-matching", 16)
    step("llama", cache, prompt(rows, 60))
    assert len(errors) == 8 * rows and all(after < 0.5 * before for before, after in errors)
    plain = KeepCache(tiny("llama"), "highest-attention", 16)
    step("llama", plain, prompt(rows, 60))
    assert [slots_of(layer) for layer in bounded(cache)] == [slots_of(layer) for layer in bounded(plain)]


def test_a_rollback_into_the_text_removes_what_stands_for_it() -> None:
    cache = KeepCache(tiny("llama"), "attention-matching", 16)
    step("llama", cache, prompt(1, 60))
    step("llama", cache, prompt(1, 3))
    cache.crop(-2)
    assert all(len(slots) == 14 for layer in bounded(cache) for slots in slots_of(layer))
    cache.crop(-2)
    assert all(len(slots) == 0 for layer in bounded(cache) for slots in slots_of(layer))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="needs the queries of a second reading"):
        KeepCache(tiny("llama"), "h2o+attention-matching", 16)
    with pytest.raises(UsageError, match="at least 1 query"):
        AttentionMatching(0)
    with pytest.raises(UsageError, match="0 or more"):
        AttentionMatching(ridge=-1.0)
    with pytest.raises(UnsupportedModelError, match="caches latents"):
        KeepCache(tiny("deepseek_v3"), "attention-matching", 16)
