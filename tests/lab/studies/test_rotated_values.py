"""Weights that rotate values: predictions stay the same, and codes of a large channel cost less."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from conftest import WORDS
from families import tiny
from kvkeep_lab.reading import cache_for, read
from kvkeep_lab.reference import judge
from kvkeep_lab.studies.rotated_values import CASES, RotatedAnswers, RotatedRow, RotatedValues, rotated_values
from kvkeep_lab.studies.rotation import hadamard
from transformers import DynamicCache

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.loading import load

IDS = torch.randint(5, len(WORDS), (1, 96), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def passed(model: Any) -> tuple[torch.Tensor, Any]:
    """Logits of a plain pass, (tokens, vocabulary), and its cache."""
    cache = DynamicCache(config=model.config)
    return model(IDS, cache=cache).logits[0].float(), cache


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])  # without biases, with them, with windows and norms
def test_caches_receive_rotated_values_and_predictions_stay_the_same(family: str) -> None:
    model = deepcopy(tiny(family))
    for name, bias in model.named_parameters():
        if name.endswith("v_proj.bias"):
            torch.nn.init.normal_(bias)
    logits, cache = passed(model)
    with rotated_values(model):
        turned, other = passed(model)
    torch.testing.assert_close(turned, logits, rtol=1e-4, atol=1e-5)
    for before, after in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(
            after.values, before.values @ hadamard(before.values.shape[-1]), atol=1e-4, rtol=1e-3
        )
        torch.testing.assert_close(after.keys, before.keys, atol=1e-4, rtol=1e-3)
    assert torch.equal(passed(model)[0], logits)


def test_packed_weights_are_rotated_in_place_so_fused_layers_use_them(model_folder: Path) -> None:
    model = load(model_folder, weights="bfloat16", device="cpu").model
    logits, cache = passed(model)
    with rotated_values(model):
        turned, other = passed(model)
    assert (turned - logits).norm() < 0.03 * logits.norm()
    first, rotated = cache.layers[0].values.float(), other.layers[0].values.float()
    assert (rotated - first @ hadamard(first.shape[-1])).norm() < 0.01 * first.norm()
    assert torch.equal(passed(model)[0], logits)


def test_codes_of_a_large_channel_cost_less_where_it_is_rotated() -> None:
    model = deepcopy(tiny("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 4
            layer.self_attn.v_proj.weight[::8] *= 30  # the first channel of each head

    def kl() -> float:
        texts = [
            [logits for logits, _ in read(model, IDS, cache_for(model, method, budget, 104), 8, [7] * 8)]
            for method, budget in (("full", None), ("h2o+quantize:2,exact=1+oneshot", "100%"))
        ]
        return fmean(judge(expected, found, 7).kl for expected, found in zip(*texts, strict=True))

    plain = kl()
    with rotated_values(model):
        assert kl() < 0.7 * plain


@pytest.mark.parametrize(("family", "reason"), [("phi3", "no v_proj"), ("gpt2", "no v_proj")])
def test_other_layouts_are_refused(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason), rotated_values(tiny(family)):
        pass


def test_other_weights_are_refused_and_nothing_is_changed(model_folder: Path) -> None:
    model = load(model_folder, weights="int8", device="cpu").model
    logits, _ = passed(model)
    with pytest.raises(UnsupportedModelError, match="float32 and bfloat16"), rotated_values(model):
        pass
    assert torch.equal(passed(model)[0], logits)


def test_passages_of_several_seeds_are_one_sample_in_a_table() -> None:
    def answers(*factors: float) -> RotatedAnswers:
        plain = [0.5 for _ in factors]
        rotated = [0.5 * factor for factor in factors]
        names = ("full", *CASES)
        return RotatedAnswers(
            [
                RotatedRow(name, turned, rotated if turned else plain, [-1.0], [1.0])
                for turned in (False, True)
                for name in names
            ]
        )

    study = RotatedValues()
    shown = study.joined([answers(0.5), answers(2.0, 1.0)])
    assert study.scores(shown)["revive"] == pytest.approx(0)
    assert all("1.00 [" in row[3] for row in study.tables(shown)[0].rows)
    assert shown.rows[0].loglik == [-1.0, -1.0]
