"""A shared pass: a cache that takes it over is as if it had read the text, and the model runs once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kvkeep_lab.reading import cache_for, read
from kvkeep_lab.shared_pass import SharedPass, takes_over
from kvkeep_lab.subject import Subject, SubjectAnswer
from measuring import subject

from kvkeep.decode.generate import generate

IDS = [(11 * number + 5) % 97 for number in range(200)]
RIGHT = [4, 9, 2]
METHODS = [
    "full", "streaming-llm", "snapkv", "h2o", "h2o+quantize:4", "adakv", "keydiff", "kvslimmer", "kvreviver-fisher",
    "kvzip", "kvzip+tiers", "revive", "attention-matching",
]  # fmt: skip


def read_alone(one: Subject) -> SubjectAnswer:
    """The answer to the prompt, read by a cache of its own for each run."""
    model, context = one.loaded.model, len(IDS) + 4
    cache = cache_for(model, one.method, one.budget, context)
    passed = read(model, torch.tensor([IDS]), cache, len(RIGHT), RIGHT)
    logs = [float(logits.double().log_softmax(-1)[token]) for (logits, _), token in zip(passed, RIGHT, strict=True)]
    cost = one._cost(cache, len(IDS), context, [0.0])
    cache = cache_for(model, one.method, one.budget, context)
    return SubjectAnswer("", generate(model, one.tokenizer, IDS, cache, max_new_tokens=4).tokens, cost, logs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_answers_are_those_of_a_method_that_reads_the_prompt_itself(method: str, family: str) -> None:
    one = subject(method, None if method == "full" else "50%", family)
    one = one.at_once()
    shared, alone = one.examine(IDS, RIGHT, 4), read_alone(one)
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
        replace(first, method=method).at_once().examine(IDS, RIGHT, 4)
    replace(first, method="full", budget=None).examine(IDS, RIGHT, 4)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("snapkv", "llama"),
        ("kv-direct", "llama"),
        ("snapkv+oneshot", "gemma3"),
        ("stock", "llama"),
        ("full", "deepseek_v3"),
        ("full", "qwen3_next"),
    ],
    ids=["chunks", "checkpoint", "windows", "stock", "latent", "recurrent"],
)
def test_a_cache_whose_pass_differs_reads_by_itself(method: str, family: str) -> None:
    one = subject(method, None if method in ("stock", "full") else "50%", family)
    assert not takes_over(cache_for(one.loaded.model, one.method, one.budget, len(IDS) + 4), len(IDS))
    assert one.examine(IDS, RIGHT, 4).logs == pytest.approx(read_alone(one).logs, abs=1e-4)


def test_the_logits_of_a_pass_are_those_of_the_model() -> None:
    model, ids = subject().loaded.model, torch.tensor([IDS])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(SharedPass.of(model, ids).logits, expected.float())


def test_no_more_is_shared_than_the_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep_lab.reading._SHARED", 1e-12)
    one = subject()
    first, second = one.examine(IDS, RIGHT, 4), one.examine(IDS[1:], RIGHT, 4)
    assert [found.shared_pass is None for found in one.readings.values()] == [False, True]
    assert (first.tokens, second.tokens) == (one.write(IDS, 4).tokens, one.write(IDS[1:], 4).tokens)


def test_methods_write_after_a_shared_pass_what_they_write_alone() -> None:
    first = subject("snapkv+oneshot", "50%")
    for method in ("snapkv+oneshot", "kvslimmer+oneshot", "kvzip", "full", "snapkv", "kv-direct"):
        one = replace(first, method=method, budget=None if method == "full" else "50%")
        alone = generate(one.loaded.model, one.tokenizer, IDS, one._cache(len(IDS) + 6), max_new_tokens=6)
        assert one.write(IDS, 6, shared=True).tokens == alone.tokens
    assert [known.shared_pass is not None for known in first.readings.values()] == [True]


def test_a_pass_continues_one_over_the_same_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    given, record = [], SharedPass.of
    monkeypatch.setattr(SharedPass, "of", lambda *some: given.append(some[3]) or record(*some))
    one = subject("snapkv", "50%").at_once()
    for ids in (IDS, [*IDS[:150], 7, 8, 9], [*IDS, 5]):
        kept = one.examine(ids, RIGHT, 4)
        assert kept.logs == pytest.approx(replace(one, readings={}, _read=None).examine(ids, RIGHT, 4).logs, abs=1e-4)
    assert given == [0, 0, 150, 0, 200, 0]


def test_a_continued_pass_is_the_pass_over_the_whole_text() -> None:
    model, ids = subject(family="qwen2").loaded.model, torch.tensor([IDS])
    whole = SharedPass.of(model, ids)
    continued = SharedPass.of(model, ids, SharedPass.of(model, ids[:, :160]), 150)
    torch.testing.assert_close(continued.logits, whole.logits, atol=1e-4, rtol=1e-4)
    for one, other in zip(continued.layers, whole.layers, strict=True):
        for mine, its in zip(one.parts, other.parts, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)
    assert continued.nbytes == whole.nbytes
