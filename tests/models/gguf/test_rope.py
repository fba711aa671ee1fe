"""Rotary embeddings of a file: scaling by keys, and factors in tensors, which no length of a text changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import written

from kvkeep import KeepCache, load
from kvkeep.errors import KvkeepError
from kvkeep.models.gguf.model import read_model
from kvkeep.models.rotary import Rotary

FACTORS = np.array([1, 1, 1.5, 2, 3, 4, 8, 8], np.float32)
"""Of the eight pairs of a head."""


def parameters(path: Path, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> dict[str, Any]:
    stated = {f"llama.rope.{key}": value for key, value in keys.items()}
    found: dict[str, Any] = read_model(
        written(path / "a.gguf", keys=stated, tensors=tensors or {})
    ).config.rope_parameters
    return found


def test_scaling_by_keys_is_read(tmp_path: Path) -> None:
    assert parameters(tmp_path, {"freq_base": 500.0}) == {"rope_type": "default", "rope_theta": 500.0}
    linear: list[dict[str, Any]] = [{"scaling.factor": 4.0}, {"scale_linear": 4.0}]
    for keys in [*linear, *({"scaling.type": kind, "scaling.factor": 4.0} for kind in ("linear", "longrope"))]:
        found = parameters(tmp_path, keys)
        assert (found["rope_type"], found["factor"]) == ("linear", 4.0)
    assert parameters(tmp_path, {"scaling.type": "none", "scaling.factor": 4.0})["rope_type"] == "default"
    yarn = parameters(tmp_path, {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32})
    assert (yarn["rope_type"], yarn["factor"], yarn["original_max_position_embeddings"]) == ("yarn", 4.0, 32)
    assert yarn["attention_factor"] == pytest.approx(1.1386294)


@pytest.mark.parametrize(
    ("keys", "tensors", "sentence"),
    [
        ({"scaling.type": "spiral"}, {}, "scales its positions by 'spiral'"),
        ({"dimension_count": 8}, {}, "rotates 8 of the 16 elements of a head"),
        ({"dimension_count": 18}, {}, "dimension_count is 18, and each of its 4 heads has 16 elements"),
        ({}, {"rope_freqs.weight": FACTORS[:5]}, "has 5 factors, .* and 8 pairs are rotated"),
        ({}, {"rope_factors_long.weight": FACTORS}, "which cannot be read together"),
        ({"scaling.factor": 2.0}, {"rope_freqs.weight": FACTORS}, "by factors in tensors and by 'linear'"),
        (
            {"scaling.type": "longrope", "scaling.factor": 2.0},
            {"rope_freqs.weight": FACTORS},
            "by factors in tensors and by 'longrope'",
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 6},
            {},
            "original_context_length is 6, too few for yarn",
        ),
        ({"freq_base": 0.0}, {}, "its llama.rope.freq_base is 0.0, and must be positive"),
        ({"scaling.factor": -4.0}, {}, "its llama.rope.scaling.factor is -4.0, and must be positive"),
        ({"scaling.attn_factor": 1.5}, {}, "with yarn and longrope only"),
    ],
)
def test_scaling_that_kvkeep_does_not_know_is_refused(
    keys: dict[str, Any], tensors: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(KvkeepError, match=sentence):
        parameters(tmp_path, keys, tensors)


@pytest.mark.parametrize("architecture", ["glm4", "gptneox", "nemotron", "phi2", "phi3", "stablelm"])
@pytest.mark.parametrize("stated", [8, 16, None])
def test_as_much_of_a_head_is_rotated_as_the_file_says(architecture: str, stated: int | None, tmp_path: Path) -> None:
    """All of it if the file says nothing; the configs of some models have another default."""
    keys: dict[str, Any] = {} if architecture in ("glm4", "phi3") else {"attention.layer_norm_epsilon": 1e-5}
    without = [f"{architecture}.attention.layer_norm_rms_epsilon"] if keys else []
    keys |= {"use_parallel_residual": True} if architecture == "gptneox" else {}
    keys |= {"rope.dimension_count": stated} if stated else {}
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    config = read_model(written(tmp_path / "a.gguf", architecture=architecture, keys=named, without=without)).config
    assert config.rope_parameters["partial_rotary_factor"] == (stated or 16) / 16


def test_all_layers_of_olmo_3_have_one_base(tmp_path: Path) -> None:
    """llama.cpp reads the base of sliding layers in this architecture, and computes with the other one."""
    keys = {"olmo2.attention.sliding_window": 8, "olmo2.rope.freq_base": 500.0, "olmo2.rope.freq_base_swa": 90.0}
    kinds = read_model(written(tmp_path / "a.gguf", architecture="olmo2", keys=keys)).config.rope_parameters
    assert [one["rope_theta"] for one in kinds.values()] == [500.0, 500.0]


def test_queries_are_not_clamped_to_a_negative_number(tmp_path: Path) -> None:
    for stated, clamp in ((-1.0, None), (0.0, None), (2.0, 2.0)):
        keys = {"olmo.attention.clamp_kqv": stated}
        file = written(
            tmp_path / "a.gguf", architecture="olmo", keys=keys, without=["olmo.attention.layer_norm_rms_epsilon"]
        )
        assert read_model(file).config.clip_qkv == clamp


def test_factors_in_a_tensor_divide_the_frequencies_of_every_text(tmp_path: Path, kernels: None) -> None:
    file = written(tmp_path / "a.gguf", tensors={"rope_freqs.weight": FACTORS})
    plain, wanted = load(written(tmp_path / "b.gguf"), device="cpu").model, torch.tensor(FACTORS)
    model = load(file, device="cpu").model
    both = [one.model.rotary_emb.inv_freq for one in (plain, model)]
    assert torch.allclose(both[0] / wanted, both[1])
    cache = KeepCache(model, "kv-direct", budget=16)
    assert cache.exactness == "exact" and cache.geometry.steady_positions is None
    ids = torch.tensor([[5, 9, 3, 7] * 12])
    assert not torch.equal(model(ids).logits, plain(ids).logits)
    rotary = model.model.rotary_emb.forward
    assert isinstance(rotary, Rotary) and rotary.exact, "the angles are the library's, on every processor"
