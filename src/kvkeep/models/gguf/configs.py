"""transformers' config of each architecture, of the file's keys and tensors.

The reference for what a file means is llama.cpp (src/models there), also where it ignores what a file states.
"""

from __future__ import annotations

from typing import Any

from kvkeep.errors import ModelError
from kvkeep.models.gguf.facts import MAX_EXPERTS, Facts
from kvkeep.models.gguf.rope import positive, rope

Config = dict[str, Any]
_ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")


def _common(facts: Facts, layout: str = "", kv_heads: int | None = None) -> Config:
    """Return what nearly all architectures state. layout: the layout of tensors that the changes undo. kv_heads: the
    key heads of layers with attention, where others have none."""
    facts.expect("attention.causal", True, "runs only models whose tokens attend to earlier ones")
    facts.expect("tensor_data_layout", layout, "does not know that layout of tensors")
    return {
        "max_position_embeddings": facts.need("context_length"),
        "hidden_size": facts.width,
        "num_hidden_layers": facts.layers,
        "intermediate_size": facts.same("feed_forward_length"),
        "num_attention_heads": facts.heads,
        "num_key_value_heads": kv_heads or facts.same("attention.head_count_kv", facts.heads),
        "head_dim": facts.head_dim,
        "rope_parameters": rope(facts),
        "vocab_size": _rows(facts),
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "attention_dropout": 0.0,
    }


def _rows(facts: Facts) -> int:
    embedding = facts.tensors.get("token_embd.weight")
    return 0 if embedding is None else embedding.shape[0]


def _rms(facts: Facts) -> Config:
    return _common(facts) | {"rms_norm_eps": _epsilon(facts, "layer_norm_rms_epsilon")}


def _layer_norm(facts: Facts, name: str = "layer_norm_eps") -> Config:
    return _common(facts) | {name: _epsilon(facts, "layer_norm_epsilon")}


def _epsilon(facts: Facts, name: str) -> float:
    facts.keys.need(f"{facts.architecture}.attention.{name}", float)
    return float(positive(facts, f"attention.{name}", 0.0))


def _windows(facts: Facts, period: int, window: int | None = None) -> Config:
    """Return the window of sliding layers and which layers slide: by the file's pattern, or all but each ``period``-th.
    window: the window if the file states none; 0: without one no layer slides; None: the file has to state one."""
    size = facts.need("attention.sliding_window") if window is None else facts.count("attention.sliding_window", window)
    if not size and window != 0:
        raise ModelError(f"'{facts.keys.file}' is damaged: its attention.sliding_window is 0.")
    key = f"{facts.architecture}.attention.sliding_window_pattern"
    stated = facts.keys.metadata.get(key)
    if stated is None or isinstance(stated, int):
        period = facts.keys.get(key, int, period)
        slides = [period > 0 and (layer % period) < period - 1 for layer in range(facts.layers)]
    else:
        slides = [bool(one) for one in facts.keys.several(key, facts.layers, bool)]
    if not size:
        return {"layer_types": ["full_attention"] * facts.layers}
    return {
        "sliding_window": size,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
    }


def _experts(facts: Facts, total: str = "num_experts") -> Config:
    count, used = facts.need("expert_count"), facts.count("expert_used_count", 0)
    if not 0 < used <= count <= MAX_EXPERTS:
        raise ModelError(
            f"'{facts.keys.file}' is damaged: it states {str(count)[:20]} experts, of which {str(used)[:20]} are used."
        )
    return {total: count, "num_experts_per_tok": used}


def llama(facts: Facts) -> Config:
    """Return the config of the architecture llama."""
    made = _rms(facts)
    if facts.count("expert_count", 0):
        return made | _experts(facts, "num_local_experts") | {"model_type": "mixtral", "sliding_window": None}
    facts.expect("expert_used_count", 0, "finds no experts in it")
    return made | {
        "model_type": "llama",
        "attention_bias": facts.has(*_ATTENTION_BIASES),
        "mlp_bias": facts.has("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
    }


def qwen2(facts: Facts) -> Config:
    """Return the config of the architecture qwen2."""
    return _rms(facts) | {"model_type": "qwen2", "use_sliding_window": False}


def qwen3(facts: Facts) -> Config:
    """Return the config of the architecture qwen3."""
    bias = facts.has(*_ATTENTION_BIASES)
    return _rms(facts) | {"model_type": "qwen3", "use_sliding_window": False, "attention_bias": bias}


def _qwen_experts(facts: Facts) -> Config:
    return _experts(facts) | {
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            layer for layer in range(facts.layers) if f"blk.{layer}.ffn_gate_inp.weight" not in facts.tensors
        ],
        "moe_intermediate_size": facts.same("expert_feed_forward_length"),
    }


def qwen2moe(facts: Facts) -> Config:
    """Return the config of the architecture qwen2moe."""
    shared = facts.same("expert_shared_feed_forward_length", facts.same("feed_forward_length"))
    return _rms(facts) | _qwen_experts(facts) | {
        "model_type": "qwen2_moe", "norm_topk_prob": False, "shared_expert_intermediate_size": shared,
    }  # fmt: skip


def qwen3moe(facts: Facts) -> Config:
    """Return the config of the architecture qwen3moe."""
    bias = facts.has(*_ATTENTION_BIASES)
    return _rms(facts) | _qwen_experts(facts) | {
        "model_type": "qwen3_moe", "norm_topk_prob": True, "attention_bias": bias,
    }  # fmt: skip


def gemma(facts: Facts) -> Config:
    """Return the config of the architecture gemma."""
    return _rms(facts) | {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(facts: Facts, largest: int) -> int:
    """Return the number by whose root queries are divided. llama.cpp knows the largest model by its layers."""
    return facts.width // facts.heads if facts.layers == largest else facts.head_dim


def gemma2(facts: Facts) -> Config:
    """Return the config of the architecture gemma2."""
    return _rms(facts) | _windows(facts, 2, 4096) | {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(facts, 46),
    }  # fmt: skip


def gemma3(facts: Facts) -> Config:
    """Return the config of the architecture gemma3."""
    made = _rms(facts)
    local = {"rope_type": "default", "rope_theta": positive(facts, "rope.freq_base_swa", 10_000.0)}
    return made | _windows(facts, 6, 0) | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(facts, 62),
        "rope_parameters": {"full_attention": made["rope_parameters"], "sliding_attention": local},
    }  # fmt: skip


def phi3(facts: Facts) -> Config:
    """Return the config of the architecture phi3."""
    facts.count("attention.sliding_window")  # llama.cpp attends to everything in this architecture
    original = facts.count("rope.scaling.original_context_length", facts.need("context_length"))
    return _rms(facts) | {
        "model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": original, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }  # fmt: skip


def phi2(facts: Facts) -> Config:
    """Return the config of the architecture phi2."""
    return _layer_norm(facts) | {"model_type": "phi", "hidden_act": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def gpt2(facts: Facts) -> Config:
    """Return the config of the architecture gpt2."""
    facts.expect("attention.causal", True, "runs only models whose tokens attend to earlier ones")
    return {
        "model_type": "gpt2",
        "n_positions": facts.need("context_length"),
        "n_embd": facts.width,
        "n_layer": facts.layers,
        "n_head": facts.heads,
        "n_inner": facts.same("feed_forward_length"),
        "layer_norm_epsilon": _epsilon(facts, "layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "vocab_size": _rows(facts),
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def starcoder2(facts: Facts) -> Config:
    """Return the config of the architecture starcoder2."""
    return _layer_norm(facts, "norm_epsilon") | {
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "sliding_window": None,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
    }


def stablelm(facts: Facts) -> Config:
    """Return the config of the architecture stablelm."""
    parallel = not facts.has("ffn_norm.weight")
    facts.expect("use_parallel_residual", parallel, "finds the opposite in its tensors")
    return _layer_norm(facts) | {
        "model_type": "stablelm",
        "use_parallel_residual": parallel,
        "use_qkv_bias": facts.has(*_ATTENTION_BIASES),
        "qk_layernorm": False,
        "hidden_dropout": 0.0,
    }


def granite(facts: Facts) -> Config:
    """Return the config of the architecture granite."""
    facts.expect("rope.scaling.finetuned", True, "does not run this architecture without rotary embeddings")
    return _rms(facts) | {
        "model_type": "granite",
        "attention_bias": facts.has(*_ATTENTION_BIASES),
        "mlp_bias": facts.has("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        "embedding_multiplier": facts.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": facts.number("residual_scale", 0.0) or 1.0,
        "attention_multiplier": facts.number("attention.scale", 0.0) or facts.head_dim**-0.5,
        "logits_scaling": facts.number("logit_scale") or 1.0,
    }


def granitemoe(facts: Facts) -> Config:
    """Return the config of the architecture granitemoe."""
    made = granite(facts) | _experts(facts, "num_local_experts")
    if not (shared := facts.same("expert_shared_feed_forward_length", 0)):
        return made | {"model_type": "granitemoe"}
    return made | {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


def olmo2(facts: Facts) -> Config:
    """Return the config of the architecture olmo2."""
    made, windows = _rms(facts) | {"attention_bias": False}, _windows(facts, 4, 0)
    if "sliding_window" not in windows:
        return made | {"model_type": "olmo2"}
    facts.number("rope.freq_base_swa")  # llama.cpp computes all layers with one base in this architecture
    local = {"rope_type": "default", "rope_theta": made["rope_parameters"]["rope_theta"]}
    kinds = {"full_attention": made["rope_parameters"], "sliding_attention": local}
    return made | windows | {"model_type": "olmo3", "rope_parameters": kinds}


def olmo(facts: Facts) -> Config:
    """Return the config of the architecture olmo."""
    facts.expect("attention.layer_norm_epsilon", 1e-5, "divides by a fixed epsilon in this architecture")
    return _common(facts) | {
        "model_type": "olmo",
        "clip_qkv": max(0.0, facts.number("attention.clamp_kqv", 0.0)) or None,
    }


def olmoe(facts: Facts) -> Config:
    """Return the config of the architecture olmoe."""
    return _rms(facts) | _experts(facts) | {"model_type": "olmoe", "norm_topk_prob": False}


def smollm3(facts: Facts) -> Config:
    """Return the config of the architecture smollm3."""
    return _rms(facts) | {
        "model_type": "smollm3",
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(facts.layers)],
        "use_sliding_window": False,
        "attention_bias": facts.has(*_ATTENTION_BIASES),
    }


def cohere(facts: Facts) -> Config:
    """Return the config of the architecture cohere."""
    return _layer_norm(facts) | {
        "model_type": "cohere",
        "logit_scale": facts.number("logit_scale", 0.0) or 1.0,
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "attention_bias": facts.has(*_ATTENTION_BIASES),
    }


def cohere2(facts: Facts) -> Config:
    """Return the config of the architecture cohere2."""
    return _layer_norm(facts) | _windows(facts, 4) | {
        "model_type": "cohere2", "logit_scale": facts.number("logit_scale") or 1.0,
        "attention_bias": facts.has(*_ATTENTION_BIASES),
    }  # fmt: skip


def nemotron(facts: Facts) -> Config:
    """Return the config of the architecture nemotron."""
    facts.number("attention.layer_norm_rms_epsilon")  # the converter writes the epsilon twice
    return _layer_norm(facts, "norm_eps") | {
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "attention_bias": facts.has(*_ATTENTION_BIASES),
        "mlp_bias": facts.has("ffn_up.bias", "ffn_down.bias"),
    }


def glm4(facts: Facts) -> Config:
    """Return the config of the architecture glm4."""
    return _rms(facts) | {"model_type": "glm4", "attention_bias": facts.has(*_ATTENTION_BIASES)}


def arcee(facts: Facts) -> Config:
    """Return the config of the architecture arcee."""
    return _rms(facts) | {"model_type": "arcee", "hidden_act": "relu2"}


def seed_oss(facts: Facts) -> Config:
    """Return the config of the architecture seed_oss."""
    return _rms(facts) | {
        "model_type": "seed_oss",
        "attention_bias": facts.has("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "attention_out_bias": facts.has("attn_output.bias"),
        "residual_dropout": 0.0,
    }


def gpt_oss(facts: Facts) -> Config:
    """Return the config of the architecture gpt_oss."""
    made = _rms(facts)
    made["rope_parameters"] |= {"truncate": True} if made["rope_parameters"]["rope_type"] == "yarn" else {}
    inner = facts.same("expert_feed_forward_length")
    return made | _windows(facts, 2) | _experts(facts, "num_local_experts") | {
        "model_type": "gpt_oss", "intermediate_size": inner, "attention_bias": True,
    }  # fmt: skip


def lfm2(facts: Facts) -> Config:
    """Return the config of the architecture lfm2."""
    heads = facts.each("attention.head_count_kv")
    return _common(facts, kv_heads=max(heads)) | {
        "model_type": "lfm2",
        "norm_eps": _epsilon(facts, "layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "conv_L_cache": facts.need("shortconv.l_cache"),
        "conv_bias": facts.has("shortconv.in_proj.bias"),
    }


def exaone4(facts: Facts) -> Config:
    """Return the config of the architecture exaone4."""
    windows = _windows(facts, 4, 4096) if facts.layers == 64 else {"sliding_window": None}
    return _rms(facts) | {"layer_types": ["full_attention"] * facts.layers} | windows | {"model_type": "exaone4"}


def ernie4_5(facts: Facts) -> Config:
    """Return the config of the architecture ernie4_5."""
    return _rms(facts) | {"model_type": "ernie4_5", "use_bias": facts.has(*_ATTENTION_BIASES)}


def hunyuan(facts: Facts) -> Config:
    """Return the config of the architecture hunyuan."""
    bias = facts.has(*_ATTENTION_BIASES)
    return _rms(facts) | {"model_type": "hunyuan_v1_dense", "attention_bias": bias}


def gptneox(facts: Facts) -> Config:
    """Return the config of the architecture gptneox."""
    return _layer_norm(facts) | {
        "model_type": "gpt_neox",
        "use_parallel_residual": facts.keys.need("gptneox.use_parallel_residual", bool),
        "attention_bias": facts.has("attn_qkv.bias"),
        "hidden_act": "gelu",
        "hidden_dropout": 0.0,
    }


def falcon(facts: Facts) -> Config:
    """Return the config of the architecture falcon."""
    kv_heads = facts.same("attention.head_count_kv", facts.heads)
    made = _common(facts, "jploski")
    facts.expect("attention.key_length", made.pop("head_dim"), "divides its width among the heads")
    return made | {
        "model_type": "falcon",
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "bias": facts.has("attn_qkv.bias", "ffn_up.bias"),
        "alibi": False,
        "ffn_hidden_size": facts.same("feed_forward_length"),
        "layer_norm_epsilon": _epsilon(facts, "layer_norm_epsilon"),
        "hidden_dropout": 0.0,
    }
