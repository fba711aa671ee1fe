"""Rotary embeddings: frequencies do not depend on the rounding of the processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from families import COMMON
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvkeep.models.rotary import Rotary, _frequencies, _parameters, replace_rotary

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


def module(theta: float, dim: int, **parameters: Any) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        hf.LlamaConfig(**COMMON, head_dim=dim, rope_parameters={"rope_theta": theta, **parameters})
    )


def moved(frequencies: torch.Tensor, steps: int) -> torch.Tensor:
    """The same numbers, all but the first and zeros so many floats further on: what another processor's power may
    give."""
    bits = frequencies.view(torch.int32).clone()
    bits[1:] += steps * (frequencies[1:] != 0)
    return bits.view(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6, 5e6, 8e6, 1e8])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_frequencies_follow_from_the_config(kind: str, theta: float, dim: int) -> None:
    embedding = module(theta, dim, **KINDS[kind])
    found = [_frequencies(_parameters(embedding, None), moved(embedding.inv_freq, steps)) for steps in (-2, 0, 2)]
    assert found[0] is not None and found[1] is not None and found[2] is not None
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    assert torch.allclose(found[1], embedding.inv_freq, rtol=2e-6, atol=0)


@pytest.mark.usefixtures("kernels")
def test_a_replaced_module_says_whether_kvkeep_computes_its_frequencies() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    for kind, parameters in [*KINDS.items(), ("yarn", yarn)]:
        embedding = module(1e4, 64, **parameters)
        replace_rotary(embedding)
        assert embedding.forward.exact is (kind != "yarn")
        assert [len(one) for one in embedding.forward.frequencies.values()] == [32]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("halves", [False, True])
def test_angles_equal_those_of_the_module(kind: str, halves: bool) -> None:
    embedding: Any = module(5e6, 128, **KINDS[kind])
    if halves:
        embedding = GptOssRotaryEmbedding(embedding.config)
    x, positions = torch.empty(0, dtype=torch.bfloat16), torch.tensor([[0, 3, 500, 8000]])
    wanted = embedding(x, positions)
    replace_rotary(embedding)
    assert isinstance(embedding.forward, Rotary)
    for ours, theirs in zip(embedding(x, positions), wanted, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 0.01
