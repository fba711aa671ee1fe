"""The geometry read from a config is what a real forward pass puts into the cache."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import COMMON, GPT
from helpers import forward
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
KB = 1024

# KV-Direct (arXiv:2603.19664), Table 1 at b = 2: KB of keys and values, KB of one residual, rho.
TABLE_1 = [
    ("SmolLM2-135M-Instruct", 22.5, 1.125, 20.0),
    ("Qwen2.5-0.5B-Instruct", 12.0, 1.75, 6.9),
    ("Qwen3-0.6B", 112.0, 2.0, 56.0),
    ("DeepSeek-R1-Distill-Qwen-1.5B", 28.0, 3.0, 9.3),
    ("Qwen2.5-1.5B-Instruct", 28.0, 3.0, 9.3),
    ("gemma-3-4b-it", 136.0, 5.0, 27.2),
]

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
SHARING = {
    "num_hidden_layers": 7, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2, "sliding_window": 6, "head_dim": 16, "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
SHARED = ["sliding", "sliding", "full", "sliding", "full", "shared", "shared"]
FALCON = {"num_key_value_heads": None}

# name: (model type, what differs from what is common, the kinds expected by layer)
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("llama", {}, ["full"] * 4),
    "llama-wide-heads": ("llama", {"head_dim": 24}, ["full"] * 4),
    "mistral": ("mistral", {"sliding_window": None}, ["full"] * 4),
    "mistral-window": ("mistral", {"sliding_window": 6}, ["sliding"] * 4),
    "qwen2": ("qwen2", {}, ["full"] * 4),
    "qwen2-window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}, ["full"] * 3 + ["sliding"],
    ),
    "qwen3": ("qwen3", {"head_dim": 16}, ["full"] * 4),
    "gemma3": (
        "gemma3_text", {"head_dim": 16, "sliding_window": 6, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
        ["sliding", "sliding", "full", "sliding"],
    ),
    "phi3": ("phi3", {}, ["full"] * 4),
    "gpt2": ("gpt2", {"n_layer": 3}, ["full"] * 3),
    "gpt_bigcode": ("gpt_bigcode", {"n_layer": 3, "n_inner": 48}, ["full"] * 3),
    "falcon": ("falcon", FALCON, ["full"] * 4),
    "falcon-new": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, ["full"] * 4),
    "qwen3_moe": (
        "qwen3_moe", {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16, "num_experts": 4},
        ["full"] * 4,
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}, ["full"] * 4),
    "deepseek_v2": ("deepseek_v2", LATENT, ["full"] * 4),
    "deepseek_v3": ("deepseek_v3", LATENT, ["full"] * 4),
    "gemma3n": ("gemma3n_text", SHARING | {"laurel_rank": 4}, SHARED),
    "gemma4": (
        "gemma4_text",
        SHARING | {"global_head_dim": 24, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        SHARED,
    ),
}  # fmt: skip


def tiny_config(name: str) -> Any:
    model_type, changes, _ = MODELS[name]
    return AutoConfig.for_model(model_type, **(GPT if model_type.startswith("gpt") else COMMON) | changes)


def hub_config(name: str) -> Any:
    return AutoConfig.for_model(**json.loads((CONFIGS / f"{name}.json").read_text()))


def filled_cache(config: Any, tokens: int = 9, batch: int = 2) -> DynamicCache:
    model, cache = AutoModelForCausalLM.from_config(config).eval(), DynamicCache(config=config)
    forward(model, cache, torch.randint(3, 97, (batch, tokens)))
    return cache


@pytest.mark.parametrize("name", MODELS)
def test_geometry_is_what_a_forward_pass_caches(name: str) -> None:
    batch, tokens, config = 2, 9, tiny_config(name)
    geometry, cache = ModelGeometry.from_config(config), filled_cache(config, tokens, batch)
    assert [layer.kind for layer in geometry.layers] == MODELS[name][2]
    measured = promised = 0
    for index, layer in enumerate(geometry.layers):
        # older transformers leave shared layers out of the cache, newer ones keep a placeholder
        cached = cache.layers[index] if index < len(cache.layers) else SimpleNamespace(keys=None)
        if not layer.owns_entries:
            assert cached.keys is None or cached.keys.numel() == 0
            continue
        entries = tokens if layer.window is None else min(tokens, layer.window - 1)
        assert cached.keys.shape == (batch, layer.kv_heads, entries, layer.key_dim)
        assert cached.values.shape == (batch, layer.kv_heads, entries, layer.value_dim)
        measured += cached.keys.nbytes + cached.values.nbytes
        promised += batch * entries * layer.entry_elements * geometry.dtype_bytes
    assert measured == promised
    full = sum(layer.entry_elements for layer in geometry.full_layers) * geometry.dtype_bytes
    assert geometry.full_bytes_per_token == full and promised <= batch * (
        tokens * full + geometry.sliding_bytes(tokens)
    )


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_shared_layers_read_the_source_that_the_model_reads(name: str) -> None:
    """Attention in a shared layer is handed the very tensors that its source layer used."""
    config = tiny_config(name)
    seen: dict[int, Any] = {}

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen[module.layer_idx] = key
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register("kvkeep_record", record)
    transformers.AttentionMaskInterface.register("kvkeep_record", lambda *args, **kwargs: None)
    config._attn_implementation = "kvkeep_record"
    filled_cache(config)
    layers = ModelGeometry.from_config(config).layers
    for layer in layers:
        assert seen[layer.index] is seen[layer.source]
        assert layer.source == layer.index or layer.kind == "shared"
        assert seen[layer.index].shape[-1] == layer.key_dim
    assert [layer.source for layer in layers] == [0, 1, 2, 3, 4, 3, 4]
    assert layers[5].window == 6 and layers[6].window is None


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("recurrent_gemma", {}, "its modules hold its recurrent states"),
        ("inkling_text", {"layer_types": ["hybrid"] * 4}, "several convolutions, or with one beside a window"),
        ("inkling_text", {"layer_types": ["hybrid", "hybrid_sliding"] * 2}, "several convolutions, or with one beside"),
        ("zaya", {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8}, "or with one beside a window"),
    ],
)
def test_states_that_a_cache_cannot_hold_are_refused(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"'{name}' .*{sentence}"):
        ModelGeometry.from_config(AutoConfig.for_model(name, num_hidden_layers=4, **changes))


def test_residuals_of_several_streams_are_as_many_vectors() -> None:
    geometry = ModelGeometry.from_config(tiny_config("gemma3n"))
    assert geometry.streams == 4
    assert geometry.residual_bytes_per_token == 4 * geometry.hidden_size * geometry.dtype_bytes


@pytest.mark.parametrize(("name", "kv", "residual", "rho"), TABLE_1)
def test_table_1_of_the_paper(name: str, kv: float, residual: float, rho: float) -> None:
    geometry = ModelGeometry.from_config(hub_config(name))
    assert geometry.dtype_bytes == 2
    assert geometry.kv_bytes_per_token / KB == kv
    assert geometry.residual_bytes_per_token / KB == residual
    assert round(geometry.kv_bytes_per_token / geometry.residual_bytes_per_token, 1) == rho


def test_gemma_3_has_five_full_and_29_sliding_layers() -> None:
    geometry = ModelGeometry.from_config(hub_config("gemma-3-4b-it"))
    assert geometry.model_type == "gemma3_text"
    assert [layer.index for layer in geometry.full_layers] == [5, 11, 17, 23, 29]
    assert len(geometry.sliding_layers) == 29
    assert geometry.sliding_bytes() == 29 * (1023 + 64) * 4 * (256 + 256) * 2
    assert geometry.sliding_bytes(100) == 29 * 128 * 4 * (256 + 256) * 2
    assert geometry.full_bytes_per_token == 5 * 4 * (256 + 256) * 2
    assert geometry.residual_checkpoint_bytes_per_token() == 5 * 2560 * 2
    assert geometry.residual_anchors(6) == (0, 6, 12, 18, 24)
    assert geometry.residual_checkpoint_bytes_per_token(stride=6) == 4 * 2560 * 2 + 4
    with pytest.raises(UsageError, match="stride"):
        geometry.residual_anchors(0)


def test_latent_heads_are_whole_where_the_model_caches_them_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    monkeypatch.delattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv")
    layer = ModelGeometry.from_config(tiny_config("deepseek_v3")).layers[0]
    assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (4, 12, 6)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [("mamba", "num_attention_heads"), ("t5", "encoder-decoder"), ("mimo_v2_flash", "twice")],
)
def test_what_cannot_be_sized_is_refused_by_name(model_type: str, missing: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}'.*{missing}"):
        ModelGeometry.from_config(AutoConfig.for_model(model_type))


def test_other_kinds_keep_their_name() -> None:
    geometry = ModelGeometry.from_config(AutoConfig.for_model("qwen3_next", **COMMON, head_dim=16))
    assert {layer.kind for layer in geometry.other_layers} == {"linear_attention"}
    assert all(layer.entry_elements == 0 for layer in geometry.other_layers)
