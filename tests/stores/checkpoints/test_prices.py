"""On a GPU, a checkpoint that costs more than keys and values from the host says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy

import pytest
from families import FAMILIES, tiny
from helpers import prompt, step
from pretended_gpu import GPU, PretendedGpu, on_gpu
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from kvkeep import KeepCache
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.methods import Request
from kvkeep.stores.checkpoints import residuals
from kvkeep.stores.checkpoints.prices import price_of_replay, price_of_residuals
from kvkeep.stores.checkpoints.spec import CheckpointSpec

LLAMA = ModelGeometry.from_config(
    LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128), 2
)
GPT2 = ModelGeometry.from_config(GPT2Config(), 2)


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered:
        yield entered


@pytest.mark.parametrize("geometry", [LLAMA, GPT2])
def test_the_default_on_a_gpu_is_keys_and_values_in_the_hosts_memory(geometry: ModelGeometry) -> None:
    spec = Request.parse("kv-direct", 64).spec(geometry, "cuda")
    assert (spec.kind, spec.where) == ("kv", "host")


def test_prices_of_llama_3_1_8b() -> None:
    residual = price_of_residuals(CheckpointSpec("residual", "host"), LLAMA)
    assert residual is not None and "take 1.9 times the bytes" in residual
    assert price_of_residuals(CheckpointSpec("residual", "host"), GPT2) is None
    assert price_of_residuals(CheckpointSpec("kv", "host"), LLAMA) is None
    tokens = price_of_replay(CheckpointSpec("tokens", "device"), LLAMA, 6_979_588_096, 8192)
    assert "31 of 32 layers again over 8,192 tokens" in tokens and "0.21 s" in tokens and "0.021 s" in tokens
    stride = price_of_replay(CheckpointSpec("residual", "device", 4), LLAMA, 6_979_588_096, 8192)
    assert "24 of 32 layers" in stride


def test_residuals_that_are_larger_warn_on_a_gpu_only(gpu: PretendedGpu) -> None:
    config = FAMILIES["llama"]()
    config.num_key_value_heads = 1
    model = LlamaForCausalLM(config).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KeepCache(model, "kv-direct", 16, checkpoint="residual")
        KeepCache(on_gpu(model), "kv-direct", 16)
    with pytest.warns(UserWarning, match="times the bytes of its keys and values"):
        KeepCache(model, "kv-direct", 16, checkpoint="residual")


@pytest.mark.parametrize("kind", ["tokens", "residual:2"])
def test_running_layers_again_warns_once_from_a_length_on(
    kind: str, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residuals, "LONG", 25)
    model, ids = on_gpu(deepcopy(tiny("llama"))), prompt(1, 40).to(GPU)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cache = KeepCache(model, "kv-direct", 16, checkpoint=kind, where="device")
        found.clear()
        step(model, cache, ids[:, :16])
        step(model, cache, ids[:, 16:26])
        assert not found
        for at in (26, 27, 28):
            step(model, cache, ids[:, at : at + 1])
    assert [str(one.message) for one in found if "layers again over 26 tokens" in str(one.message)] and len(found) == 1
