"""Tiny models whose log-probabilities are recorded: configurations of transformers that leave nothing at its default.

Everything that changes numbers is set so that the 48 positions of a record show it: windows of 8 entries, a scaled rope
whose original length is 16, scales and caps far from 1. A name may occur in several variants.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import transformers

VOCABULARY = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
ORIGINAL: dict[str, Any] = {"original_max_position_embeddings": 16}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
EPS: dict[str, Any] = {"rms_norm_eps": 0.01}


def _rope(kind: str = "default", theta: float = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def _longrope(**more: Any) -> dict[str, Any]:
    factors: dict[str, Any] = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.5, 8.0]}
    return _rope("longrope", **factors, **more)


MANY_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1,
}  # fmt: skip
"""Some models have windows, or norms of queries, where llama.cpp counts 64 layers."""
NORM_EPS: dict[str, Any] = {"layer_norm_eps": 0.01}
SCALES: dict[str, Any] = {
    "embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.5, "attention_multiplier": 0.5,
}  # fmt: skip
ROUTED: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-6, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip
LLAMA: dict[str, Any] = COMMON | EPS | UNTIED | _rope()

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | TIED | {"head_dim": 16}),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", LLAMA | _rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, **ORIGINAL)),
    "llama-linear": ("Llama", LLAMA | _rope("linear", factor=4.0)),
    "llama-yarn": ("Llama", LLAMA | _rope("yarn", factor=4.0, **ORIGINAL)),
    "llama-yarn-betas": ("Llama", LLAMA | _rope("yarn", factor=4.0, beta_fast=0.5, beta_slow=0.1, **ORIGINAL)),
    "llama-yarn-factor": ("Llama", LLAMA | _rope("yarn", factor=4.0, attention_factor=1.5, **ORIGINAL)),
    "mistral": ("Mistral", LLAMA | {"head_dim": 16, "sliding_window": None}),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2-yarn": ("Qwen2", LLAMA | _rope("yarn", factor=4.0, **ORIGINAL)),
    "qwen3": ("Qwen3", LLAMA | TIED | {"head_dim": 16}),
    "gemma": ("Gemma", COMMON | EPS | {"head_dim": 16}),
    "gemma2": ("Gemma2", COMMON | EPS | {
        "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0, "num_hidden_layers": 4}),
    "gemma3": ("Gemma3Text", COMMON | EPS | {
        "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}}),
    "phi3": ("Phi3", LLAMA | {"sliding_window": None, **ORIGINAL, "original_max_position_embeddings": 64}),
    "phi3-window": ("Phi3", LLAMA | {"sliding_window": 8, "original_max_position_embeddings": 64}),
    "phi3-longrope": ("Phi3", LLAMA | ORIGINAL | _longrope(**ORIGINAL) | {"sliding_window": None}),
    "phi3-longrope-short": ("Phi3", LLAMA | _longrope(original_max_position_embeddings=256) | {
        "sliding_window": None, "max_position_embeddings": 512, "original_max_position_embeddings": 256}),
    "qwen2moe": ("Qwen2Moe", LLAMA | EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": False}),
    "qwen3moe": ("Qwen3Moe", LLAMA | EXPERTS | {
        "num_experts": 4, "head_dim": 16, "decoder_sparse_step": 1, "norm_topk_prob": True}),
    "gpt2": ("GPT2", GPT | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 0.01}),
    "starcoder": ("GPTBigCode", GPT | {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 0.01}),
    "starcoder2": ("Starcoder2", COMMON | _rope() | {"norm_epsilon": 0.01, "use_bias": True, "sliding_window": None}),
    "granite": ("Granite", LLAMA | SCALES | {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("GraniteMoe", LLAMA | SCALES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": ("GraniteMoeShared", LLAMA | SCALES | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}),
    "olmo": ("Olmo", COMMON | UNTIED | _rope() | {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2", LLAMA),
    "olmo3": ("Olmo3", LLAMA | _rope() | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmoe": ("Olmoe", LLAMA | {
        "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "stablelm": ("StableLm", COMMON | NORM_EPS | UNTIED | {"use_qkv_bias": True} | _rope(
        theta=10000.0, partial_rotary_factor=0.5)),
    "stablelm-qk-norms": ("StableLm", COMMON | NORM_EPS | UNTIED | {
        "use_parallel_residual": True, "qk_layernorm": True} | _rope(theta=10000.0, partial_rotary_factor=0.5)),
    "smollm3": ("SmolLM3", LLAMA | TIED | {"num_hidden_layers": 4}),
    "glm": ("Glm", LLAMA | _rope(partial_rotary_factor=0.5) | {"head_dim": 8, "attention_bias": True}),
    "glm4": ("Glm4", LLAMA | _rope(partial_rotary_factor=0.5) | {"head_dim": 16, "attention_bias": True}),
    "glm4moe": ("Glm4Moe", LLAMA | ROUTED | _rope(partial_rotary_factor=0.5) | {
        "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0}),
    "command-r": ("Cohere", COMMON | NORM_EPS | _rope() | {"logit_scale": 1.5}),
    "command-r-qk-norms": ("Cohere", COMMON | NORM_EPS | _rope() | MANY_LAYERS | {
        "logit_scale": 1.5, "use_qk_norm": True}),
    "cohere2": ("Cohere2", COMMON | NORM_EPS | _rope() | {
        "logit_scale": 1.5, "sliding_window": 8, "num_hidden_layers": 4, "rotary_pct": 1.0}),
    "nemotron": ("Nemotron", COMMON | UNTIED | _rope(partial_rotary_factor=0.5) | {
        "norm_eps": 0.01, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "falcon": ("Falcon", GPT | {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 1,
        "layer_norm_epsilon": 0.01}),
    "falcon-new": ("Falcon", GPT | UNTIED | {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "new_decoder_architecture": True, "layer_norm_epsilon": 0.01, "bias": False}),
    "phi2": ("Phi", COMMON | NORM_EPS | UNTIED | _rope(theta=10000.0, partial_rotary_factor=0.5) | {
        "num_key_value_heads": 4, "intermediate_size": 128}),
    "phimoe": ("Phimoe", LLAMA | {"original_max_position_embeddings": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "attention_bias": True,
        "lm_head_bias": True}),
    "gpt-oss": ("GptOss", LLAMA | {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
        | _rope("yarn", factor=4.0, **ORIGINAL)),
    "deepseek2": ("DeepseekV2", LLAMA | LATENT | {
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
        "topk_method": "greedy", "moe_intermediate_size": 24, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}),
    "deepseek3": ("DeepseekV3", LLAMA | LATENT | ROUTED | GROUPS | {
        "num_nextn_predict_layers": 0, "norm_topk_prob": True, "rms_norm_eps": 1e-6}),
    "deepseek3-yarn": ("DeepseekV3", LLAMA | LATENT | ROUTED | _rope(
        "yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, **ORIGINAL) | {
        "num_nextn_predict_layers": 0, "norm_topk_prob": True, "rms_norm_eps": 1e-6}),
    "exaone4": ("Exaone4", LLAMA | {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4-windows": ("Exaone4", LLAMA | MANY_LAYERS | {"sliding_window": 8, "sliding_window_pattern": 4}),
    "bloom": ("Bloom", GPT | {"hidden_size": 32, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 0.01}),
    "gptneox": ("GPTNeoX", COMMON | NORM_EPS | UNTIED | {"rotary_pct": 0.5, "use_parallel_residual": True}),
    "gptneox-serial": ("GPTNeoX", COMMON | NORM_EPS | UNTIED | {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "mpt": ("Mpt", GPT | {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "attn_config": {"clip_qkv": 0.5}}),
    "arcee": ("Arcee", LLAMA | {"head_dim": 8}),
    "apertus": ("Apertus", LLAMA | _rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, **ORIGINAL)),
    "ernie4_5": ("Ernie4_5", LLAMA | {"head_dim": 8, "use_bias": False}),
    "ernie4_5-moe": ("Ernie4_5_Moe", LLAMA | {
        "moe_intermediate_size": 24, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    "seed_oss": ("SeedOss", LLAMA | {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "hunyuan-dense": ("HunYuanDenseV1", LLAMA | {"head_dim": 16}),
    "hunyuan-moe": ("HunYuanMoEV1", LLAMA | {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "dots1": ("Dots1", LLAMA | ROUTED | {
        "head_dim": 16, "sliding_window": None, "norm_topk_prob": True}),
    "llama4": ("Llama4Text", LLAMA | _rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, **ORIGINAL) | {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
        "intermediate_size": 24, "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
        "attn_temperature_tuning": True, "rms_norm_eps": 1e-5}),
    "mistral3": ("Ministral3", LLAMA | {"head_dim": 16, "sliding_window": None} | _rope(
        "yarn", factor=4.0, beta_fast=0.5, beta_slow=0.1, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
        **ORIGINAL)),
    "afmoe": ("Afmoe", LLAMA | EXPERTS | {
        "head_dim": 16, "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.5,
        "num_hidden_layers": 4, "sliding_window": 8, "mup_enabled": True}),
    "laguna": ("Laguna", LLAMA | EXPERTS | {
        "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 24, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"], "moe_routed_scaling_factor": 1.5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}}}),
    "jais2": ("Jais2", COMMON | NORM_EPS | UNTIED | _rope() | {"head_dim": 8, "num_key_value_heads": 4}),
    "exaone-moe": ("ExaoneMoe", LLAMA | EXPERTS | {
        "head_dim": 16, "num_experts": 4, "num_shared_experts": 1, "sliding_window": 8, "num_hidden_layers": 4,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1}),
    "minimax-m2": ("MiniMaxM2", LLAMA | _rope(partial_rotary_factor=0.5) | {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3n": ("Gemma3nText", COMMON | EPS | {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 22, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8, "num_kv_shared_layers": 0, "rms_norm_eps": 4.0,
        "vocab_size_per_layer_input": VOCABULARY, "layer_types": ["sliding_attention", "full_attention"] * 11,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}}),
    "gemma4": ("Gemma4Text", COMMON | EPS | {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "lfm2": ("Lfm2", COMMON | _rope() | {
        "norm_eps": 0.01, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("Lfm2Moe", COMMON | _rope() | EXPERTS | {
        "norm_eps": 0.01, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1}),
    "qwen3next": ("Qwen3Next", LLAMA | EXPERTS | DELTA | _rope(partial_rotary_factor=0.5) | {
        "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3_5": ("Qwen3_5Text", LLAMA | DELTA | _rope(
        partial_rotary_factor=0.5, mrope_section=[2, 1, 1]) | {"head_dim": 16}),
    "qwen3_5moe": ("Qwen3_5MoeText", LLAMA | EXPERTS | DELTA | _rope(
        partial_rotary_factor=0.5, mrope_section=[2, 1, 1]) | {
        "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "falcon-h1": ("FalconH1", LLAMA | MAMBA2 | {
        "head_dim": 8, "mamba_d_ssm": 64, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
        "key_multiplier": 0.5, "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.75,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.5, "mlp_multipliers": [0.75, 1.5],
        "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0]}),
    "granitehybrid": ("GraniteMoeHybrid", LLAMA | SCALES | MAMBA2 | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 24, "position_embedding_type": "nope"}),
    "bamba": ("Bamba", LLAMA | MAMBA2 | _rope(partial_rotary_factor=1.0) | {"attn_layer_indices": [1]}),
    "mamba": ("Mamba", GPT | {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4, "layer_norm_epsilon": 0.01}),
    "mamba2": ("Mamba2", GPT | {
        "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1,
        "layer_norm_epsilon": 0.01, "chunk_size": 16}),
    "nemotron_h": ("NemotronH", COMMON | UNTIED | {
        "num_hidden_layers": 3, "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "layers_block_type": ["mamba", "attention", "moe"], "n_groups": 1, "chunk_size": 16, "n_routed_experts": 4,
        "n_shared_experts": 1, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 1.5, "time_step_min": 1e-20}),
    "jamba": ("Jamba", LLAMA | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 4}),
}  # fmt: skip
"""Variant to the class of its configuration in transformers (``LlamaConfig``), and what it is given."""


OLDER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 64},
    "glm": {"layernorm_epsilon": 0.01, "rope_ratio": 0.05},
    "gptneox": {"rotary_pct": 0.5},
    "gptneox-serial": {"rotary_pct": 0.5},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "minimax-m2": {"rotary_dim": 8, "scoring_func": "sigmoid"},
    "afmoe": {"route_norm": True},
    "gemma3n": {"num_kv_shared_layers": 2},
    "exaone-moe": {"scoring_func": "sigmoid"},
    "deepseek3": {"scoring_func": "sigmoid"},
    "deepseek3-yarn": {"scoring_func": "sigmoid"},
    "dots1": {"scoring_func": "sigmoid"},
    "nemotron_h": {"rms_norm_eps": 1e-5},
    "granitehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan-moe": {"moe_intermediate_size": [48, 48], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
}
"""What the converter reads of a config.json, and transformers 5.24 writes under another name, or not at all."""

COMPUTED: dict[str, dict[str, Any]] = {
    "phi3-window": {"sliding_window": None},
    "llama-yarn-betas": _rope("yarn", factor=4.0, **ORIGINAL),
    "llama-yarn-factor": _rope("yarn", factor=4.0, **ORIGINAL),
    "gemma3n": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [NormalDist().cdf(1.6448533535003662 * (24 / 23) ** 0.5)] * 10 + [0.0] * 12,
    },
}
"""What llama.cpp computes in place of what the file states: it ignores the windows of Phi 3, and the keys of YaRN's
range (``yarn_beta_fast``, ``yarn_beta_slow``) and factor (``yarn_attn_factor``) but for Grok and Mistral 3. For the
sparse layers of Gemma 3n, it divides a variance by one less than the number of activations. The folder of Gemma 3n has
keys and values of all layers, as the published ones have; those of the last two are not used."""

DIFFERENT: dict[str, str] = {
    "phimoe": "transformers weighs an expert among those near it (SparseMixer), llama.cpp two by their softmax",
}
"""Variants for which llama.cpp computes something that transformers has not, and what."""


def configuration(variant: str, computed: bool = False) -> Any:
    """The configuration of a variant: as it is written, or as llama.cpp computes it."""
    kind, given = ARCHITECTURES[variant]
    return getattr(transformers, f"{kind}Config")(**given | (COMPUTED.get(variant, {}) if computed else {}))
