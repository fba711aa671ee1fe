"""Perplexity: windows score each token once, and without eviction it is the model's own."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from conftest import tokenizer
from families import tiny
from kvkeep_lab.tasks.perplexity import Perplexity
from measuring import subject

from kvkeep.errors import UsageError


@pytest.fixture
def data(tmp_path: Path, words: str) -> Path:
    (tmp_path / "wikitext2_test.txt").write_text(words)
    return tmp_path


def windows(data: Path, seed: int = 0, **sizes: Any) -> list[Any]:
    task = Perplexity(**sizes)
    return task.prepare(tokenizer(), task.sources(data), task.points()[0], seed)


def test_windows_score_each_token_once(data: Path, words: str) -> None:
    ids = tokenizer()(words).input_ids
    apart = windows(data, length=[50], samples=4)
    assert [sample.ids for sample in apart] == [ids[:50], ids[50:100], ids[100:150], ids[150:]]
    assert {sample.facts["first"] for sample in apart} == {1}
    over = windows(data, length=[50], stride=20, samples=8)
    assert [sample.ids for sample in over] == [ids[start : start + 50] for start in range(0, 160, 20)]
    assert {sample.facts["first"] for sample in over} == {30}  # the last 20, so that each is scored once
    drawn = windows(data, seed=3, length=[50], stride=20, samples=3)
    assert drawn == windows(data, seed=3, length=[50], stride=20, samples=3) and all(one in over for one in drawn)


def test_impossible_windows_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 4 windows of 50 tokens, and 5 are wanted"):
        windows(data, length=[50], samples=5)
    with pytest.raises(ValueError, match="a stride of 60 tokens leaves some out of windows of 50"):
        Perplexity(length=[100, 50], stride=60)
    with pytest.raises(UsageError, match="There is no file"):
        windows(data, file="other.txt")


@pytest.mark.parametrize("method", ["full", "kv-direct", "stock"])
@pytest.mark.parametrize(("first", "step"), [(1, 1), (1, 7), (30, 1), (30, 8), (39, 5)])
def test_without_eviction_perplexity_is_the_models_own(data: Path, method: str, first: int, step: int) -> None:
    (sample,) = windows(data, length=[40], samples=1)
    every = tiny("llama")(torch.tensor([sample.ids])).logits[0].detach().double().log_softmax(-1)
    expected = [float(every[place - 1, sample.ids[place]]) for place in range(first, 40)]
    logs, cost = subject(method, "16" if method == "kv-direct" else None).score(sample.ids, first, step)
    assert logs == pytest.approx(expected, abs=1e-5)
    assert cost.prompt_tokens == 40 and (cost.token_s is None) == (first == 39)


@pytest.mark.parametrize("step", [1, 4])
def test_the_window_method_equals_the_model_with_a_band_mask(data: Path, step: int) -> None:
    (sample,) = windows(data, length=[48], samples=1)
    mask = torch.full((48, 48), float("-inf"))
    for place in range(48):  # the first token is read alone, as a prompt
        start = (place - 1) // step * step + 1 if place else 0
        before = 15 if step == 1 else 16  # one token counts itself; several come beside what is held
        mask[place, max(0, start - before) : place + 1] = 0.0
    logits = tiny("llama")(torch.tensor([sample.ids]), attention_mask=mask[None, None]).logits[0].detach()
    logs = logits.double().log_softmax(-1)[torch.arange(47), torch.tensor(sample.ids[1:])].tolist()
    assert subject("window", "16").score(sample.ids, 1, step)[0] == pytest.approx(logs, abs=1e-5)


def test_the_score_is_the_mean_over_tokens(data: Path) -> None:
    task = Perplexity(length=[40], stride=10, step=3, samples=2)
    for sample in task.prepare(tokenizer(), task.sources(data), task.points()[0], 0):
        logs, _ = subject("h2o", "16").score(sample.ids, 30, 3)
        found = task.measure(subject("h2o", "16"), sample)
        assert found.scores == {"nll": pytest.approx(-fmean(logs))} and len(logs) == 10
        assert found.cost.entries == 16 and found.cost.exactness == "lossy"
