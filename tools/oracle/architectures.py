"""Tiny models whose log-probabilities are recorded: a configuration of transformers for each, with nothing at its default.

Everything that changes numbers is set so that the 48 positions of a record show it: windows of 8 entries, a scaled rope
whose original length is 16, scales and caps far from 1. A name may occur in several variants.
"""

from __future__ import annotations

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
    factors = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.5, 8.0]}
    return _rope("longrope", **factors, **more)


LLAMA: dict[str, Any] = COMMON | EPS | UNTIED | _rope()

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | TIED | {"head_dim": 16}),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", LLAMA | _rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, **ORIGINAL)),
    "llama-linear": ("Llama", LLAMA | _rope("linear", factor=4.0)),
    "llama-yarn": ("Llama", LLAMA | _rope("yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0, **ORIGINAL)),
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
    "phi3-longrope": ("Phi3", LLAMA | ORIGINAL | _longrope(**ORIGINAL) | {"sliding_window": None}),
    "phi3-longrope-short": ("Phi3", LLAMA | _longrope(original_max_position_embeddings=256) | {
        "sliding_window": None, "max_position_embeddings": 512, "original_max_position_embeddings": 256}),
    "qwen2moe": ("Qwen2Moe", LLAMA | EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1, "norm_topk_prob": False}),
    "qwen3moe": ("Qwen3Moe", LLAMA | EXPERTS | {
        "num_experts": 4, "head_dim": 16, "decoder_sparse_step": 1, "norm_topk_prob": True}),
}  # fmt: skip
"""Variant to the class of its configuration in transformers (``LlamaConfig``), and what it is given."""


def configuration(variant: str) -> Any:
    """The configuration of a variant."""
    kind, given = ARCHITECTURES[variant]
    return getattr(transformers, f"{kind}Config")(**given)
