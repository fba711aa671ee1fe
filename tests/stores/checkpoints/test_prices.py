"""On a GPU, chunks are long enough to hide the copies of entries from the host, and a checkpoint that costs more than
these says so."""

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
from kvkeep.budget import LONGEST_CHUNK, SPARE
from kvkeep.geometry import ModelGeometry
from kvkeep.plan import sizes as planned_sizes
from kvkeep.policies import methods
from kvkeep.policies.methods import Request
from kvkeep.stores.checkpoints import residuals
from kvkeep.stores.checkpoints.prices import (
    FLOPS,
    HOST_BYTES,
    LARGEST_CHUNK,
    longest_chunk,
    price_of_replay,
    price_of_residuals,
)
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


@pytest.mark.parametrize(
    "heads,kv_heads,expected", [(32, 8, 3072), (64, 8, 2048), (9, 3, 4096), (32, 32, LARGEST_CHUNK)]
)
def test_attention_of_a_chunk_to_an_entry_takes_as_long_as_copying_it(heads: int, kv_heads: int, expected: int) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    config = LlamaConfig(hidden_size=128 * heads, num_hidden_layers=5, **shape)
    geometry = ModelGeometry.from_config(config, 2)
    chunk = longest_chunk(geometry)
    assert chunk == expected
    attending = 4 * 5 * heads * 128 * chunk / FLOPS
    assert attending >= geometry.full_bytes_per_token / HOST_BYTES or chunk == LARGEST_CHUNK
    assert longest_chunk(ModelGeometry.from_config(config, 4)) == LONGEST_CHUNK


def test_a_prompt_is_read_in_chunks_that_hide_the_copies(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, from the host's memory. They copy less, and their bytes are planned."""
    layers, budget, length, longest = 12, 100, 400, 140
    for module in (methods, planned_sizes):
        monkeypatch.setattr(module, "longest_chunk", lambda geometry: longest)
    here = deepcopy(tiny("llama", layers)).bfloat16()
    assert KeepCache(here, "kv-direct", budget, checkpoint="kv").stream.chunk == budget * layers // SPARE
    model, ids, copied = on_gpu(here), prompt(1, length).to(GPU), list[int]()
    caches = [KeepCache(model, "kv-direct", budget, chunk=chunk) for chunk in (None, budget // 2)]
    for cache in caches:
        gpu.clear()
        step(model, cache, ids)
        copied.append(gpu.copied_bytes["to device, pinned"])
    assert caches[0].stream.chunk == longest and copied[0] < 0.5 * copied[1]
    assert KeepCache(model, "kv-direct", budget, where="device").stream.chunk == budget * layers // SPARE
    memory, spec = caches[0].memory(), caches[0].spec
    planned = planned_sizes.sizes(ModelGeometry.of(model), caches[0].method, length, budget, spec, shared=False)
    assert planned.chunk_bytes == longest * 2 * 2 * 8 * 2
    assert memory.peak_cache_bytes <= planned.resident + planned.device + planned.chunk_bytes
    assert memory.checkpoint_bytes == {"device": planned.device, "host": planned.host, "disk": 0}


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
