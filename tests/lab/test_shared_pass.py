"""A shared pass: a cache that takes it over is as if it had read the text, and the model runs once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvkeep_lab.reading import cache_for
from kvkeep_lab.shared_pass import SharedPass, takes_over
from measuring import subject

IDS = [(11 * number + 5) % 97 for number in range(200)]
RIGHT = [4, 9, 2]
METHODS = [
    "full", "streaming-llm", "snapkv", "h2o", "h2o+quantize:4", "adakv", "keydiff", "kvslimmer", "kvreviver-fisher",
    "kvzip", "kvzip+tiers", "revive", "attention-matching",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_answers_are_those_of_a_method_that_reads_the_prompt_itself(method: str, family: str) -> None:
    one = subject(method, None if method == "full" else "50%", family)
    shared, alone = one.examine_at_once(IDS, RIGHT, 4), one.at_once().examine(IDS, RIGHT, 4)
    assert shared.logs == pytest.approx(alone.logs, abs=1e-4) and shared.tokens == alone.tokens
    costs = [replace(found.cost, prefill_s=0, token_s=0, memory={}) for found in (shared, alone)]
    assert costs[0] == costs[1] and shared.cost.held_bytes == alone.cost.held_bytes
    (readings,) = one.readings.values()
    assert readings.shared_pass is not None


def test_the_model_reads_a_prompt_once_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    made, record = [], SharedPass.of
    monkeypatch.setattr(SharedPass, "of", lambda *given: made.append(1) or record(*given))
    first = subject("snapkv", "50%")
    for method in ("snapkv", "h2o", "kvzip", "kvzip+tiers"):
        replace(first, method=method).examine_at_once(IDS, RIGHT, 4)
    replace(first, method="full", budget=None).examine_at_once(IDS, RIGHT, 4)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("method", "family"),
    [("snapkv", "llama"), ("kv-direct", "llama"), ("snapkv+oneshot", "gemma3"), ("stock", "llama")],
    ids=["chunks", "checkpoint", "windows", "stock"],
)
def test_a_cache_whose_pass_differs_reads_by_itself(method: str, family: str) -> None:
    one = subject(method, None if method == "stock" else "50%", family)
    assert not takes_over(cache_for(one.loaded.model, one.method, one.budget, len(IDS) + 4), len(IDS))
    found = one.examine_at_once(IDS, RIGHT, 4)
    assert found.logs == pytest.approx(one.at_once().examine(IDS, RIGHT, 4).logs, abs=1e-4)


def test_the_logits_of_a_pass_are_those_of_the_model() -> None:
    model, ids = subject().loaded.model, torch.tensor([IDS])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(SharedPass.of(model, ids).logits, expected.float())
