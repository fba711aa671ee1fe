"""Tiny random models of every family, built from transformers configs: one list that all tests walk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf

VOCABULARY = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512}
_EXPERTS = COMMON | {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_WINDOWS = COMMON | {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}

_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**COMMON),
    "mistral": lambda: hf.MistralConfig(**COMMON, sliding_window=None),
    "qwen2": lambda: hf.Qwen2Config(**COMMON),
    "qwen3": lambda: hf.Qwen3Config(**COMMON, head_dim=16),
    "gemma2": lambda: hf.Gemma2Config(**_WINDOWS, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "gemma3": lambda: hf.Gemma3TextConfig(**_WINDOWS, query_pre_attn_scalar=16),
    "phi3": lambda: hf.Phi3Config(**COMMON),
    "gpt2": lambda: hf.GPT2Config(**GPT, bos_token_id=1, eos_token_id=None, pad_token_id=0),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_EXPERTS, head_dim=16, num_experts=4, decoder_sparse_step=1),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_EXPERTS | {"num_key_value_heads": 4}, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
        first_k_dense_replace=2, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **_WINDOWS, global_head_dim=16, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **_WINDOWS, num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4, activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_WINDOWS, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **_EXPERTS | {"layer_types": ["linear_attention", "full_attention"] * 2}, head_dim=16, num_experts=4,
        shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "lfm2": lambda: hf.Lfm2Config(
        **COMMON, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
    ),
    "bamba": lambda: hf.BambaConfig(**COMMON | _MAMBA, attn_layer_indices=[1, 3]),
    "falcon_h1": lambda: hf.FalconH1Config(**COMMON | _MAMBA, mamba_d_ssm=64),
}  # fmt: skip

_WIDE = COMMON | {"intermediate_size": 64, "head_dim": 16}
_SQUARE = COMMON | {"hidden_size": 64, "intermediate_size": 64}  # heads of 16
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
_ROUTED = _WIDE | {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 8}
LAYOUTS: dict[str, Callable[[], Any]] = {
    "afmoe": lambda: hf.AfmoeConfig(  # gates attention's output by a projection; its full layers rotate nothing
        **_ROUTED, num_dense_layers=2, num_shared_experts=1, sliding_window=16, layer_types=_WINDOWS["layer_types"]
    ),
    "cohere": lambda: hf.CohereConfig(**_WIDE),  # the MLP beside attention; pairs, whose angles lie beside each other
    "cohere2": lambda: hf.Cohere2Config(**_WIDE, sliding_window=16, layer_types=_WINDOWS["layer_types"]),
    "exaone4": lambda: hf.Exaone4Config(**_WIDE, sliding_window=16, sliding_window_pattern=2),  # no norms before
    "ernie4_5": lambda: hf.Ernie4_5Config(**_WIDE, num_layers=4),  # rotates pairs, and rounds only the sum
    "gemma4": lambda: hf.Gemma4TextConfig(  # reads entries of earlier layers, and a side input
        **_WINDOWS | {"intermediate_size": 64}, global_head_dim=32, num_kv_shared_layers=2,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCABULARY,
    ),
    "gemma4 without values": lambda: hf.Gemma4TextConfig(  # of full layers, whose values are their keys
        **_WINDOWS | {"intermediate_size": 64}, global_head_dim=32, num_global_key_value_heads=1,
        attention_k_eq_v=True, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    ),
    "glm4": lambda: hf.Glm4Config(**_WIDE | _HALF),  # rotates pairs of half of each head
    "glm4_moe": lambda: hf.Glm4MoeConfig(**_WIDE | _HALF, first_k_dense_replace=4, use_qk_norm=True),
    "gemma2": lambda: hf.Gemma2Config(  # caps scores
        **_WINDOWS | {"intermediate_size": 64}, query_pre_attn_scalar=1, attn_logit_softcapping=0.5,
        final_logit_softcapping=None,
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(  # head by head; adds attention and the MLP first
        **_SQUARE | {"num_key_value_heads": 4}, rotary_pct=0.5, hidden_act="gelu"
    ),
    "gpt_neox in turn": lambda: hf.GPTNeoXConfig(
        **_SQUARE | {"num_key_value_heads": 4}, rotary_pct=0.25, use_parallel_residual=False
    ),
    "granite": lambda: hf.GraniteConfig(**_WIDE, residual_multiplier=0.3, attention_multiplier=0.2),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**_WIDE),  # rotates before its norms
    "ministral3": lambda: hf.Ministral3Config(  # scales queries by their position
        **_WIDE,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10_000.0, "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        },
    ),
    "nemotron": lambda: hf.NemotronConfig(**_WIDE | _HALF),  # LayerNorms with factors 1 + weight; squared ReLU
    "olmo": lambda: hf.OlmoConfig(**COMMON | {"intermediate_size": 64}),  # LayerNorms without weights
    "olmo with a bound": lambda: hf.OlmoConfig(**COMMON | {"intermediate_size": 64}, clip_qkv=0.5),
    "olmo2": lambda: hf.Olmo2Config(**COMMON | {"intermediate_size": 64}),  # norms of all heads
    "phi": lambda: hf.PhiConfig(**_SQUARE | _HALF),  # adds attention and the MLP before the residual
    "phi3": lambda: hf.Phi3Config(**COMMON | {"intermediate_size": 64}, partial_rotary_factor=0.5, sliding_window=20),
    "smollm3": lambda: hf.SmolLM3Config(**_WIDE, no_rope_layer_interval=2),  # half of its layers rotate nothing
    "stablelm": lambda: hf.StableLmConfig(**_SQUARE | _HALF),  # LayerNorms with biases
    "stablelm side by side": lambda: hf.StableLmConfig(**_SQUARE | _HALF, use_parallel_residual=True),
    "starcoder2": lambda: hf.Starcoder2Config(**_SQUARE, sliding_window=None),
}  # fmt: skip
"""Families whose layers differ from Llama's, of widths that the native library multiplies."""

_LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 2}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
BESIDE_RECURRENT: dict[str, Callable[[], Any]] = {
    "falcon_h1": lambda: hf.FalconH1Config(  # both in each layer, with factors
        **_WIDE | _MAMBA | {"mamba_d_state": 16}, mamba_d_ssm=64, key_multiplier=0.5, attention_in_multiplier=1.5,
        attention_out_multiplier=0.75, ssm_in_multiplier=1.25, ssm_out_multiplier=0.6, mlp_multipliers=[0.75, 1.3],
        ssm_multipliers=[0.5, 0.75, 1.25, 1.5, 2.0],
    ),
    "lfm2": lambda: hf.Lfm2Config(
        **_WIDE | {"layer_types": ["conv", "full_attention"] * 2}, block_auto_adjust_ff_dim=False
    ),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **_ROUTED | {"layer_types": ["conv", "full_attention"] * 2}, num_dense_layers=2
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(  # gates attention's output, rotates a quarter of each head
        **_ROUTED | _LAYERS | _DELTA, shared_expert_intermediate_size=32
    ),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**_WIDE | _LAYERS | _DELTA),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(  # rotates nothing
        **_WIDE | _MAMBA | _LAYERS | {"mamba_d_state": 16}, num_local_experts=8, num_experts_per_tok=2,
        shared_intermediate_size=32, residual_multiplier=0.3, position_embedding_type="nope",
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(  # layers of attention without an MLP
        **_WIDE | {"num_hidden_layers": 6}, ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=16, n_groups=1,
        layers_block_type=["linear_attention", "full_attention", "mlp"] * 2, chunk_size=16,
    ),
    "granitemoehybrid without experts": lambda: hf.GraniteMoeHybridConfig(
        **_WIDE | _MAMBA | _LAYERS | {"mamba_d_state": 16}, num_local_experts=0, shared_intermediate_size=32,
    ),
}  # fmt: skip
"""Families whose layers have attention or a recurrent module, of widths that the native library multiplies."""

HYBRIDS: dict[str, Callable[[], Any]] = {
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **COMMON | _MAMBA, layer_types=["linear_attention", "full_attention"] * 2, num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=24,
    ),
    "jamba": lambda: hf.JambaConfig(
        **COMMON, attn_layer_period=2, attn_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **COMMON | {"num_hidden_layers": 6}, head_dim=8, ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16,
        layers_block_type=["linear_attention", "full_attention", "mlp"] * 2, n_groups=1, chunk_size=16,
    ),
}  # fmt: skip
"""More families with recurrent layers, which only ``test_recurrent.py`` runs."""

SMOLLM2 = hf.LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip

# Checkpoint kinds that rebuild entries from residuals, which a family refuses, and why.
REFUSES: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("gemma4", "qwen3_next", "lfm2", "bamba", "falcon_h1"), ("residual:3", "tokens")
) | {"gemma3n": ("residual", "residual:3", "tokens")}  # its residual has several streams


@cache
def tiny(family: str, layers: int | None = None, positions: int | None = None, vocabulary: int | None = None) -> Any:
    """Return the tiny model of ``family``, the same for every call: float32, eval mode, larger-than-usual weights
    so that attention is not flat. ``layers``: of full attention, so many; ``positions`` and tokens of the
    ``vocabulary``, so many."""
    torch.manual_seed(0)
    config = (FAMILIES | HYBRIDS)[family]()
    if layers is not None:
        config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    config.max_position_embeddings = positions or config.max_position_embeddings
    config.vocab_size = vocabulary or config.vocab_size
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model
