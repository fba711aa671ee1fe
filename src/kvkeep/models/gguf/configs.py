"""transformers' config of each architecture, of the file's keys and tensors.

The reference for what a file means is llama.cpp (src/models there), also where it ignores what a file states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvkeep.models.gguf.facts import MAX_EXPERTS, Facts
from kvkeep.models.gguf.rope import positive, rope

Config = dict[str, Any]
_Make = Callable[[Facts], Config]


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
        "vocab_size": facts.vocabulary,
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "attention_dropout": 0.0,
    }


def _rms(facts: Facts) -> Config:
    return _common(facts) | {"rms_norm_eps": _epsilon(facts, "layer_norm_rms_epsilon")}


def _layer_norm(facts: Facts) -> Config:
    return _common(facts) | {"layer_norm_eps": _epsilon(facts, "layer_norm_epsilon")}


def _epsilon(facts: Facts, name: str) -> float:
    facts.keys.need(f"{facts.architecture}.attention.{name}", float)
    return float(positive(facts, f"attention.{name}", 0.0))


def _windows(facts: Facts, period: int, window: int | None = None) -> Config:
    """Return the window of sliding layers and which layers slide: by the file's pattern, or all but each ``period``-th.
    window: the window if the file states none; 0: without one no layer slides; None: the file has to state one."""
    size = facts.need("attention.sliding_window") if window is None else facts.count("attention.sliding_window", window)
    if not size and window != 0:
        raise facts.keys.damaged("its attention.sliding_window is 0")
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
        raise facts.keys.damaged(f"it states {str(count)[:20]} experts, of which {str(used)[:20]} are used")
    return {total: count, "num_experts_per_tok": used}


def _made(base: _Make, family: str, *parts: Mapping[str, Any], **settings: Any) -> _Make:
    """Return what makes the config of a ``family``: what ``base`` reads, and these settings. A setting that can be
    called is given the facts."""
    stated = {"model_type": family, **settings}
    for part in parts:
        stated |= part

    def make(facts: Facts) -> Config:
        read = {name: value(facts) if callable(value) else value for name, value in stated.items()}
        return base(facts) | read

    return make


def _has(*names: str) -> Callable[[Facts], bool]:
    return lambda facts: facts.has(*names)


_HAS_BIAS = _has("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_BIAS = {"attention_bias": _HAS_BIAS}
_MLP_BIAS = {"mlp_bias": _has("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")}
_NO_WINDOW = {"use_sliding_window": False}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_QWEN_EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": lambda facts: [
        layer for layer in range(facts.layers) if f"blk.{layer}.ffn_gate_inp.weight" not in facts.tensors
    ],
    "moe_intermediate_size": lambda facts: facts.same("expert_feed_forward_length"),
}


def _one(name: str) -> Callable[[Facts], float]:
    """Return what reads a factor; files state none, or 0, for 1."""
    return lambda facts: facts.number(name, 0.0) or 1.0


def _rms_with_experts(facts: Facts) -> Config:
    return _rms(facts) | _experts(facts)


def _llama(facts: Facts) -> Config:
    if facts.count("expert_count", 0):
        return _rms(facts) | _experts(facts, "num_local_experts") | {"model_type": "mixtral", "sliding_window": None}
    facts.expect("expert_used_count", 0, "finds no experts in it")
    return _made(_rms, "llama", _BIAS, _MLP_BIAS)(facts)


def _gemma3(facts: Facts) -> Config:
    made = _rms(facts)
    return made | _windows(facts, 6, 0) | {
        "model_type": "gemma3_text",
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(facts, 62),
        "rope_parameters": _by_type(made, positive(facts, "rope.freq_base_swa", 10_000.0)),
    } | _GELU  # fmt: skip


def _query_scalar(facts: Facts, largest: int) -> int:
    """Return the number by whose root queries are divided. llama.cpp knows the largest model by its layers."""
    return facts.width // facts.heads if facts.layers == largest else facts.head_dim


def _by_type(made: Config, theta: float) -> Config:
    """Return the rotation of full attention as stated, and that of sliding layers by the base ``theta``."""
    return {
        "full_attention": made["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


def _phi3(facts: Facts) -> Config:
    facts.count("attention.sliding_window")  # llama.cpp attends to everything in this architecture
    original = facts.count("rope.scaling.original_context_length", facts.need("context_length"))
    return _rms(facts) | {"original_max_position_embeddings": original, "sliding_window": None}


def _gpt2(facts: Facts) -> Config:
    facts.expect("attention.causal", True, "runs only models whose tokens attend to earlier ones")
    return {
        "n_positions": facts.need("context_length"),
        "n_embd": facts.width,
        "n_layer": facts.layers,
        "n_head": facts.heads,
        "n_inner": facts.same("feed_forward_length"),
        "layer_norm_epsilon": _epsilon(facts, "layer_norm_epsilon"),
        "vocab_size": facts.vocabulary,
        "tie_word_embeddings": "output.weight" not in facts.tensors,
    }


def _stablelm(facts: Facts) -> Config:
    parallel = not facts.has("ffn_norm.weight")
    facts.expect("use_parallel_residual", parallel, "finds the opposite in its tensors")
    return _layer_norm(facts) | {"use_parallel_residual": parallel}


def _granite(facts: Facts) -> Config:
    facts.expect("rope.scaling.finetuned", True, "does not run this architecture without rotary embeddings")
    return _made(
        _rms, "granite", _BIAS, _MLP_BIAS,
        embedding_multiplier=_one("embedding_scale"),
        residual_multiplier=_one("residual_scale"),
        attention_multiplier=lambda facts: facts.number("attention.scale", 0.0) or facts.head_dim**-0.5,
        logits_scaling=_one("logit_scale"),
    )(facts)  # fmt: skip


def _granitemoe(facts: Facts) -> Config:
    made = _granite(facts) | _experts(facts, "num_local_experts")
    if not (shared := facts.same("expert_shared_feed_forward_length", 0)):
        return made | {"model_type": "granitemoe"}
    return made | {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


def _olmo(facts: Facts) -> Config:
    facts.expect("attention.layer_norm_epsilon", 1e-5, "divides by a fixed epsilon in this architecture")
    return _common(facts) | {"clip_qkv": max(0.0, facts.number("attention.clamp_kqv", 0.0)) or None}


def _olmo2(facts: Facts) -> Config:
    made, windows = _rms(facts) | {"attention_bias": False}, _windows(facts, 4, 0)
    if "sliding_window" not in windows:
        return made | {"model_type": "olmo2"}
    facts.number("rope.freq_base_swa")  # llama.cpp computes all layers with one base in this architecture
    kinds = _by_type(made, made["rope_parameters"]["rope_theta"])
    return made | windows | {"model_type": "olmo3", "rope_parameters": kinds}


def _nemotron(facts: Facts) -> Config:
    facts.number("attention.layer_norm_rms_epsilon")  # the converter writes the epsilon twice
    return _common(facts) | {"norm_eps": _epsilon(facts, "layer_norm_epsilon")}


def _gpt_oss(facts: Facts) -> Config:
    made = _rms(facts)
    made["rope_parameters"] |= {"truncate": True} if made["rope_parameters"]["rope_type"] == "yarn" else {}
    inner = {"intermediate_size": facts.same("expert_feed_forward_length")}
    return made | _windows(facts, 2) | _experts(facts, "num_local_experts") | inner


def _lfm2(facts: Facts) -> Config:
    heads = facts.each("attention.head_count_kv")
    return _common(facts, kv_heads=max(heads)) | {
        "norm_eps": _epsilon(facts, "layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "conv_L_cache": facts.need("shortconv.l_cache"),
    }


def _exaone4(facts: Facts) -> Config:
    windows = _windows(facts, 4, 4096) if facts.layers == 64 else {"sliding_window": None}
    return _rms(facts) | {"layer_types": ["full_attention"] * facts.layers} | windows


def _falcon(facts: Facts) -> Config:
    kv_heads = facts.same("attention.head_count_kv", facts.heads)
    made = _common(facts, "jploski")
    facts.expect("attention.key_length", made.pop("head_dim"), "divides its width among the heads")
    return made | {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "ffn_hidden_size": facts.same("feed_forward_length"),
        "layer_norm_epsilon": _epsilon(facts, "layer_norm_epsilon"),
    }


CONFIGS: Mapping[str, _Make] = {
    "llama": _llama,
    "qwen2": _made(_rms, "qwen2", _NO_WINDOW),
    "qwen3": _made(_rms, "qwen3", _NO_WINDOW, _BIAS),
    "qwen2moe": _made(
        _rms_with_experts, "qwen2_moe", _NO_WINDOW, _QWEN_EXPERTS,
        norm_topk_prob=False,
        shared_expert_intermediate_size=lambda facts: facts.same(
            "expert_shared_feed_forward_length", facts.same("feed_forward_length")
        ),
    ),
    "qwen3moe": _made(_rms_with_experts, "qwen3_moe", _NO_WINDOW, _QWEN_EXPERTS, _BIAS, norm_topk_prob=True),
    "gemma": _made(_rms, "gemma", _GELU),
    "gemma2": _made(
        lambda facts: _rms(facts) | _windows(facts, 2, 4096), "gemma2", _GELU,
        attn_logit_softcapping=lambda facts: facts.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=lambda facts: facts.number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=lambda facts: _query_scalar(facts, 46),
    ),
    "gemma3": _gemma3,
    "phi3": _made(_phi3, "phi3", resid_pdrop=0.0, embd_pdrop=0.0),
    "phi2": _made(_layer_norm, "phi", hidden_act="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0),
    "gpt2": _made(_gpt2, "gpt2", activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "starcoder2": _made(
        lambda facts: _common(facts) | {"norm_epsilon": _epsilon(facts, "layer_norm_epsilon")}, "starcoder2",
        hidden_act="gelu_pytorch_tanh", use_bias=True, sliding_window=None, residual_dropout=0.0, embedding_dropout=0.0,
    ),
    "stablelm": _made(_stablelm, "stablelm", use_qkv_bias=_HAS_BIAS, qk_layernorm=False, hidden_dropout=0.0),
    "granite": _granite,
    "granitemoe": _granitemoe,
    "olmo": _made(_olmo, "olmo"),
    "olmo2": _olmo2,
    "olmoe": _made(_rms_with_experts, "olmoe", norm_topk_prob=False),
    "smollm3": _made(
        _rms, "smollm3", _NO_WINDOW, _BIAS,
        no_rope_layers=lambda facts: [int((layer + 1) % 4 != 0) for layer in range(facts.layers)],
    ),
    "command-r": _made(
        _layer_norm, "cohere", _BIAS, logit_scale=_one("logit_scale"), use_qk_norm=_has("attn_q_norm.weight")
    ),
    "cohere2": _made(
        lambda facts: _layer_norm(facts) | _windows(facts, 4), "cohere2", _BIAS, logit_scale=_one("logit_scale")
    ),
    "nemotron": _made(_nemotron, "nemotron", _BIAS, _MLP_BIAS, hidden_act="relu2"),
    "glm4": _made(_rms, "glm4", _BIAS),
    "arcee": _made(_rms, "arcee", hidden_act="relu2"),
    "seed_oss": _made(
        _rms, "seed_oss", attention_bias=_has("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        attention_out_bias=_has("attn_output.bias"), residual_dropout=0.0,
    ),
    "gpt-oss": _made(_gpt_oss, "gpt_oss", attention_bias=True),
    "exaone4": _made(_exaone4, "exaone4"),
    "ernie4_5": _made(_rms, "ernie4_5", use_bias=_HAS_BIAS),
    "hunyuan-dense": _made(_rms, "hunyuan_v1_dense", _BIAS),
    "gptneox": _made(
        _layer_norm, "gpt_neox", hidden_act="gelu", hidden_dropout=0.0, attention_bias=_has("attn_qkv.bias"),
        use_parallel_residual=lambda facts: facts.keys.need("gptneox.use_parallel_residual", bool),
    ),
    "falcon": _made(
        _falcon, "falcon", new_decoder_architecture=False, parallel_attn=True, alibi=False, hidden_dropout=0.0,
        bias=_has("attn_qkv.bias", "ffn_up.bias"),
    ),
    "lfm2": _made(_lfm2, "lfm2", block_auto_adjust_ff_dim=False, conv_bias=_has("shortconv.in_proj.bias")),
}  # fmt: skip
"""What makes the config of each architecture, by llama.cpp's names."""
