"""Tiny random mixtures of experts, of widths that the native library multiplies."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from families import COMMON

MIXTURES = {
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**COMMON | OWN, head_dim=16, num_experts=8, decoder_sparse_step=1),
    "mixtral": lambda: hf.MixtralConfig(
        **COMMON | {"intermediate_size": 32}, num_local_experts=8, num_experts_per_tok=2
    ),
    "olmoe": lambda: hf.OlmoeConfig(**COMMON | {"intermediate_size": 32}, num_experts=8, num_experts_per_tok=2),
    "gpt_oss": lambda: hf.GptOssConfig(
        **COMMON | {"intermediate_size": 32}, head_dim=16, num_local_experts=8, num_experts_per_tok=2
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **COMMON | OWN | LATENT, n_routed_experts=8, n_shared_experts=1, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", first_k_dense_replace=0,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **COMMON | OWN | LATENT, n_routed_experts=8, n_shared_experts=1, n_group=4, topk_group=2,
        first_k_dense_replace=0,
    ),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **COMMON | {"moe_intermediate_size": 32, "moe_k": 2}, moe_num_experts=8, moe_num_shared_experts=1,
        moe_layer_start_index=0,
    ),
    "minimax_m2": lambda: hf.MiniMaxM2Config(
        **COMMON | {"intermediate_size": 32}, head_dim=16, num_local_experts=8, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **COMMON | OWN, head_dim=16, num_experts=8, num_dense_layers=0,
        layer_types=["conv", "full_attention"] * 2,
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **COMMON | {"intermediate_size": 32}, num_local_experts=8, num_experts_per_tok=2, residual_multiplier=0.3
    ),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(
        **COMMON | {"intermediate_size": 32}, num_local_experts=8, num_experts_per_tok=2, residual_multiplier=0.3,
        shared_intermediate_size=32,
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **COMMON | OWN, head_dim=16, n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(  # multiplies the output of its shared expert by a share
        **COMMON | OWN, num_experts=8, shared_expert_intermediate_size=48, decoder_sparse_step=1,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **COMMON | {"num_hidden_layers": 2}, head_dim=8, layers_block_type=["full_attention", "moe"],
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
}  # fmt: skip
INNER_ROUTERS = {
    "hunyuan_v1_moe": lambda: hf.HunYuanMoEV1Config(
        **COMMON | {"intermediate_size": 32}, head_dim=16, num_experts=8, moe_topk=2
    ),
    "afmoe": lambda: hf.AfmoeConfig(
        **COMMON | OWN, head_dim=16, num_experts=8, num_dense_layers=0, num_shared_experts=1, sliding_window=16
    ),
}
"""Mixtures whose routers have their weight in a layer of their own."""
OWN = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


def mixture(family: str) -> Any:
    torch.manual_seed(1)
    model = hf.AutoModelForCausalLM.from_config((MIXTURES | INNER_ROUTERS)[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0) if parameter.any() else parameter.normal_()
    return model.eval()
