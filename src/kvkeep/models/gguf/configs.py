"""transformers' config of each architecture, of the file's keys and tensors.

The reference for what a file means is llama.cpp (src/models there), also where it ignores what a file states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.gguf.config_parts import (
    BIAS,
    GRANITE,
    HAS_BIAS,
    MLP_BIAS,
    Config,
    Make,
    common,
    epsilon,
    expert_counts,
    factor,
    has,
    layer_norm,
    made_of,
    rms,
    routing,
    sigmoid_routing,
    windows,
)
from kvkeep.models.gguf.facts import MAX_HEAD_DIM, Facts
from kvkeep.models.gguf.hybrid_configs import HYBRIDS
from kvkeep.models.gguf.rope import FACTORS, positive, rope

_NO_WINDOW = {"use_sliding_window": False}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_QWEN_EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": lambda facts: [
        layer for layer in range(facts.layers) if f"blk.{layer}.ffn_gate_inp.weight" not in facts.tensors
    ],
    "moe_intermediate_size": lambda facts: facts.same("expert_feed_forward_length"),
}


def _rms_with_experts(facts: Facts) -> Config:
    return rms(facts) | expert_counts(facts)


def _llama(facts: Facts) -> Config:
    if facts.count("expert_count", 0):
        return (
            rms(facts) | expert_counts(facts, "num_local_experts") | {"model_type": "mixtral", "sliding_window": None}
        )
    facts.expect("expert_used_count", 0, "finds no experts in it")
    return made_of(rms, "llama", BIAS, MLP_BIAS)(facts)


def _gemma3(facts: Facts) -> Config:
    made = rms(facts)
    return made | windows(facts, 6, 0) | {
        "model_type": "gemma3_text",
        "final_logit_softcapping": facts.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(facts, 62),
        "rope_parameters": _by_type(made, positive(facts, "rope.freq_base_swa", 10_000.0)),
    } | _GELU  # fmt: skip


def _gemma3n(facts: Facts) -> Config:
    made, sliding = rms(facts, inner=1), windows(facts, 5)
    wide, layers, types = facts.each("feed_forward_length"), facts.layers, sliding["layer_types"]
    facts.expect("altup.num_inputs", 4, "runs four streams in this architecture, as llama.cpp does")
    facts.expect("altup.active_idx", 0, "runs the layers on the first stream, as llama.cpp does")
    facts.expect("final_logit_softcapping", 30.0, "caps the logits of this architecture at 30, as llama.cpp does")
    storing = layers - facts.sharing
    facts.expect("attention.shared_kv_layers", facts.sharing, f"gives {storing} of {layers} layers keys of their own")
    if storing < layers and types[storing - 2 : storing] != ["sliding_attention", "full_attention"]:
        raise UnsupportedModelError(
            f"'{facts.keys.file}' has no sliding layer {storing - 2} and full layer {storing - 1}, whose keys and "
            "values llama.cpp takes for the layers after them."
        )
    if min(wide) < 2:
        raise facts.keys.damaged(f"its feed_forward_length is {min(wide)}")
    stated = facts.keys.items(f"{facts.architecture}.activation_sparsity_scale", float)
    if stated is not None and not _close(stated, [_SPARSE] * min(10, layers) + [-math.inf] * (layers - 10)):
        raise UnsupportedModelError(
            f"'{facts.keys.file}' states another gemma3n.activation_sparsity_scale than that of llama.cpp, whose first "
            "ten layers keep the largest 5 % of their activations."
        )
    return made | sliding | {
        "model_type": "gemma3n_text",
        "intermediate_size": wide,
        "activation_sparsity_pattern": [_sparsity(one) if at < 10 else 0.0 for at, one in enumerate(wide)],
        "num_kv_shared_layers": facts.sharing,
        "hidden_size_per_layer_input": facts.count("embedding_length_per_layer_input", 256),
        "vocab_size_per_layer_input": facts.vocabulary,
        "final_logit_softcapping": 30.0,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "rope_parameters": _by_type(made, positive(facts, "rope.freq_base_swa", 10_000.0)),
    } | _GELU  # fmt: skip


_SPARSE = 1.6448533535003662
"""Sparse layers of Gemma 3n keep gates that exceed the mean by so many standard deviations."""


def _sparsity(width: int) -> float:
    """Return the share of dropped activations from which transformers computes llama.cpp's threshold: llama.cpp divides
    the variance by one less than the width, transformers by the width."""
    return NormalDist().cdf(_SPARSE * math.sqrt(width / (width - 1)))


def _close(found: list[float], wanted: list[float]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return len(found) == len(wanted) and all(math.isclose(one, other, rel_tol=1e-6) for one, other in pairs)


def _gemma4(facts: Facts) -> Config:
    made, turned = rms(facts, kv_heads=1, inner=1), facts.values(FACTORS).flatten()
    sliding, wide = windows(facts, 6), facts.each("feed_forward_length")
    heads = facts.each("attention.head_count_kv")
    full = [layer for layer, kind in enumerate(sliding["layer_types"]) if kind == "full_attention"]
    others = sorted({*range(facts.layers)} - {*full})
    slid = facts.need("attention.key_length_swa")
    facts.expect("attention.value_length_swa", slid, "reads only heads whose keys and values have one width")
    facts.expect("rope.dimension_count_swa", slid, "rotates all elements of heads in sliding layers")
    parts = facts.count("embedding_length_per_layer_input", 0)
    if not full or not others or len({heads[one] for one in full}) > 1 or len({heads[one] for one in others}) > 1:
        raise facts.keys.damaged(
            "its sliding or its full layers differ in their key heads, or it has only one of the two kinds"
        )
    if not 0 <= facts.sharing < facts.layers:
        raise facts.keys.damaged(f"{facts.sharing} of its {facts.layers} layers use the keys of earlier ones")
    rotated, theta = int((turned == 1.0).sum()), made["rope_parameters"]["rope_theta"]
    if not bool((turned[:rotated] == 1.0).all() and (turned[rotated:] >= 1e29).all()):
        raise UnsupportedModelError(
            f"'{facts.keys.file}' scales its frequencies by factors, which kvkeep does not read."
        )
    return made | sliding | {
        "model_type": "gemma4_text",
        "head_dim": slid,
        "num_key_value_heads": heads[others[0]],
        "per_layer_config": {
            layer: {"head_dim": facts.head_dim, "num_key_value_heads": heads[layer]} for layer in full
        },
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in facts.tensors,
        "intermediate_size": wide[0],
        "use_double_wide_mlp": wide[-1] != wide[0],
        "num_kv_shared_layers": facts.sharing,
        "hidden_size_per_layer_input": parts,
        "vocab_size_per_layer_input": facts.vocabulary,
        "final_logit_softcapping": positive(facts, "final_logit_softcapping", 30.0, 0.0) or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": rotated / len(turned),
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": positive(facts, "rope.freq_base_swa", 10_000.0),
            },
        },
    } | _GELU  # fmt: skip


def _deepseek2(facts: Facts) -> Config:
    """Attention to latent vectors (DeepSeek V2 and V3, GLM 4.7 Flash)."""
    # Older files state the widths of heads, later ones those of the latent vectors, too.
    rotated, count = facts.need("rope.dimension_count"), facts.count
    keys = count("attention.key_length_mla", count("attention.key_length"))
    values = count("attention.value_length_mla", count("attention.value_length"))
    if keys is None or values is None or not 0 < rotated < keys <= MAX_HEAD_DIM:
        raise facts.keys.damaged(f"its heads have {keys} and {values} elements, of which {rotated} are rotated")
    facts.count("attention.head_count_kv")
    turns = rope(facts, rotated)
    if turns["rope_type"] == "yarn":
        turns["mscale"] = turns["mscale_all_dim"] = 10 * facts.number("rope.scaling.yarn_log_multiplier", 0.0)
        facts.expect("rope.scaling.attn_factor", 1.0, "computes this factor itself")
        del turns["attention_factor"]
    gating = facts.count("expert_gating_func", 2 if facts.has("exp_probs_b.bias") else 1)
    sigmoid = gating == 2
    if not sigmoid:
        facts.expect("expert_gating_func", 1, "supports routing by softmax and by sigmoid in this architecture")
        facts.expect("expert_weights_norm", False, "does not normalise the weights of softmax here")
        facts.expect("expert_group_count", 1, "does not group the experts of softmax as llama.cpp does")
    made = {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        **rms(facts, kv_heads=facts.heads, rotary=turns),
        **expert_counts(facts, "n_routed_experts"),
        **routing(facts),
        "q_lora_rank": facts.count("attention.q_lora_rank") if facts.has("attn_q_a.weight") else None,
        "kv_lora_rank": facts.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "n_shared_experts": facts.need("expert_shared_count"),
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "moe_intermediate_size": facts.same("expert_feed_forward_length"),
    }
    return made if sigmoid else made | {"topk_method": "greedy"}


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
    return rms(facts) | {"original_max_position_embeddings": original, "sliding_window": None}


def _gpt2(facts: Facts) -> Config:
    facts.expect("attention.causal", True, "runs only models whose tokens attend to earlier ones")
    return {
        "n_positions": facts.need("context_length"),
        "n_embd": facts.width,
        "n_layer": facts.layers,
        "n_head": facts.heads,
        "n_inner": facts.same("feed_forward_length"),
        "layer_norm_epsilon": epsilon(facts, "layer_norm_epsilon"),
        "vocab_size": facts.vocabulary,
        "tie_word_embeddings": "output.weight" not in facts.tensors,
    }


def _stablelm(facts: Facts) -> Config:
    parallel = not facts.has("ffn_norm.weight")
    facts.expect("use_parallel_residual", parallel, "finds the opposite in its tensors")
    return layer_norm(facts) | {"use_parallel_residual": parallel}


def _granite(facts: Facts) -> Config:
    if not facts.count("expert_count", 0):
        facts.expect("expert_used_count", 0, "finds no experts in it")
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        facts.count(f"ssm.{key}")  # of Granite 4 without recurrent layers, whose converter is that of hybrids
    facts.expect("rope.scaling.finetuned", True, "does not run this architecture without rotary embeddings")
    return made_of(rms, "granite", BIAS, MLP_BIAS, GRANITE)(facts)


def _granitemoe(facts: Facts) -> Config:
    made = _granite(facts) | expert_counts(facts, "num_local_experts")
    if not (shared := facts.same("expert_shared_feed_forward_length", 0)):
        return made | {"model_type": "granitemoe"}
    return made | {"model_type": "granitemoeshared", "shared_intermediate_size": shared}


def _routed(facts: Facts) -> Config:
    """Return the config of experts chosen by sigmoids and a bias, beside a shared one, behind some dense layers."""
    sigmoid_routing(facts)
    return rms(facts) | expert_counts(facts, "n_routed_experts") | routing(facts) | {
        "n_shared_experts": facts.need("expert_shared_count"),
        "first_k_dense_replace": facts.count("leading_dense_block_count", 0),
        "moe_intermediate_size": facts.same("expert_feed_forward_length"),
    }  # fmt: skip


def _as_wide_as_routed(facts: Facts, count: int, width: int) -> None:
    key, wanted = "expert_shared_feed_forward_length", count * width
    facts.expect(key, wanted, "expects the shared experts to be as wide as the routed ones")


def _exaone_moe(facts: Facts) -> Config:
    made = _routed(facts)
    width, count = made["moe_intermediate_size"], made.pop("n_shared_experts")
    _as_wide_as_routed(facts, count, width)
    return made | windows(facts, 4, 0) | {
        "model_type": "exaone_moe", "num_experts": made.pop("n_routed_experts"), "num_shared_experts": count,
    }  # fmt: skip


def _ernie_moe(facts: Facts) -> Config:
    made, experts = rms(facts), expert_counts(facts, "moe_num_experts")
    width, count = facts.same("expert_feed_forward_length"), facts.count("expert_shared_count", 0)
    _as_wide_as_routed(facts, count, width)
    return made | {
        "model_type": "ernie4_5_moe",
        "use_bias": HAS_BIAS(facts),
        "moe_num_experts": experts["moe_num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "moe_num_shared_experts": count,
        "moe_layer_start_index": facts.count("leading_dense_block_count", 0),
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(facts: Facts) -> Config:
    experts, width = expert_counts(facts), facts.same("feed_forward_length")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        facts.expect(key, width, "expects all experts of this architecture to be as wide as its feed_forward_length")
    facts.expect("expert_shared_count", 1, "runs one shared expert in this architecture")
    return rms(facts) | {
        "model_type": "hunyuan_v1_moe", "attention_bias": HAS_BIAS(facts),
        "num_experts": experts["num_experts"], "moe_topk": experts["num_experts_per_tok"],
    }  # fmt: skip


def _minimax(facts: Facts) -> Config:
    sigmoid_routing(facts)
    inner = {"intermediate_size": facts.same("expert_feed_forward_length")}
    return rms(facts) | expert_counts(facts, "num_local_experts") | inner | {"model_type": "minimax_m2"}


def _afmoe(facts: Facts) -> Config:
    facts.keys.need("afmoe.expert_weights_norm", bool)
    facts.expect("expert_weights_norm", True, "supports only normalised expert weights in this architecture")
    for key in ("expert_group_count", "expert_group_used_count"):
        facts.expect(key, 1, "does not group experts in this architecture")
    sigmoid_routing(facts)
    return rms(facts) | expert_counts(facts) | windows(facts, 4) | {
        "model_type": "afmoe",
        "num_shared_experts": facts.need("expert_shared_count"),
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "moe_intermediate_size": facts.same("expert_feed_forward_length"),
        "route_scale": factor("expert_weights_scale")(facts),
        "mup_enabled": True,
    }  # fmt: skip


def _mistral3(facts: Facts) -> Config:
    made = rms(facts)
    turns, beta = made["rope_parameters"], facts.number("attention.temperature_scale", 0.0)
    multiplier = facts.number("rope.scaling.yarn_log_multiplier", 0.0)
    if turns["rope_type"] == "yarn":
        turns |= {
            "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if multiplier:  # it divides what YaRN multiplies by
            turns["attention_factor"] /= 1.0 + 0.1 * multiplier * math.log(max(1.0, turns["factor"]))
    original = facts.count("rope.scaling.original_context_length", facts.need("context_length"))
    return made | {
        "model_type": "ministral3",
        "rope_parameters": turns | {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original},
        "sliding_window": None,
    }


def _olmo(facts: Facts) -> Config:
    facts.expect("attention.layer_norm_epsilon", 1e-5, "divides by a fixed epsilon in this architecture")
    return common(facts) | {"clip_qkv": max(0.0, facts.number("attention.clamp_kqv", 0.0)) or None}


def _olmo2(facts: Facts) -> Config:
    made, sliding = rms(facts) | {"attention_bias": False}, windows(facts, 4, 0)
    if "sliding_window" not in sliding:
        return made | {"model_type": "olmo2"}
    facts.number("rope.freq_base_swa")  # llama.cpp computes all layers with one base in this architecture
    kinds = _by_type(made, made["rope_parameters"]["rope_theta"])
    return made | sliding | {"model_type": "olmo3", "rope_parameters": kinds}


def _nemotron(facts: Facts) -> Config:
    facts.number("attention.layer_norm_rms_epsilon")  # the converter writes the epsilon twice
    return common(facts) | {"norm_eps": epsilon(facts, "layer_norm_epsilon")}


def _gpt_oss(facts: Facts) -> Config:
    made = rms(facts)
    made["rope_parameters"] |= {"truncate": True} if made["rope_parameters"]["rope_type"] == "yarn" else {}
    inner = {"intermediate_size": facts.same("expert_feed_forward_length")}
    return made | windows(facts, 2) | expert_counts(facts, "num_local_experts") | inner


def _exaone4(facts: Facts) -> Config:
    sliding = windows(facts, 4, 4096) if facts.layers == 64 else {"sliding_window": None}
    return rms(facts) | {"layer_types": ["full_attention"] * facts.layers} | sliding


def _falcon(facts: Facts) -> Config:
    kv_heads = facts.same("attention.head_count_kv", facts.heads)
    made = common(facts, "jploski")
    facts.expect("attention.key_length", made.pop("head_dim"), "divides its width among the heads")
    return made | {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "ffn_hidden_size": facts.same("feed_forward_length"),
        "layer_norm_epsilon": epsilon(facts, "layer_norm_epsilon"),
    }


CONFIGS: Mapping[str, Make] = {
    "llama": _llama,
    "qwen2": made_of(rms, "qwen2", _NO_WINDOW),
    "qwen3": made_of(rms, "qwen3", _NO_WINDOW, BIAS),
    "qwen2moe": made_of(
        _rms_with_experts, "qwen2_moe", _NO_WINDOW, _QWEN_EXPERTS,
        norm_topk_prob=False,
        shared_expert_intermediate_size=lambda facts: facts.same(
            "expert_shared_feed_forward_length", facts.same("feed_forward_length")
        ),
    ),
    "qwen3moe": made_of(_rms_with_experts, "qwen3_moe", _NO_WINDOW, _QWEN_EXPERTS, BIAS, norm_topk_prob=True),
    "gemma": made_of(rms, "gemma", _GELU),
    "gemma2": made_of(
        lambda facts: rms(facts) | windows(facts, 2, 4096), "gemma2", _GELU,
        attn_logit_softcapping=lambda facts: facts.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=lambda facts: facts.number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=lambda facts: _query_scalar(facts, 46),
    ),
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "deepseek2": _deepseek2,
    "phi3": made_of(_phi3, "phi3", resid_pdrop=0.0, embd_pdrop=0.0),
    "phi2": made_of(layer_norm, "phi", hidden_act="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0),
    "gpt2": made_of(_gpt2, "gpt2", activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "starcoder2": made_of(
        lambda facts: common(facts) | {"norm_epsilon": epsilon(facts, "layer_norm_epsilon")}, "starcoder2",
        hidden_act="gelu_pytorch_tanh", use_bias=True, sliding_window=None, residual_dropout=0.0, embedding_dropout=0.0,
    ),
    "stablelm": made_of(_stablelm, "stablelm", use_qkv_bias=HAS_BIAS, qk_layernorm=False, hidden_dropout=0.0),
    "granite": _granite,
    "granitemoe": _granitemoe,
    "olmo": made_of(_olmo, "olmo"),
    "olmo2": _olmo2,
    "olmoe": made_of(_rms_with_experts, "olmoe", norm_topk_prob=False),
    "smollm3": made_of(
        rms, "smollm3", _NO_WINDOW, BIAS,
        no_rope_layers=lambda facts: [int((layer + 1) % 4 != 0) for layer in range(facts.layers)],
    ),
    "command-r": made_of(
        layer_norm, "cohere", BIAS, logit_scale=factor("logit_scale"), use_qk_norm=has("attn_q_norm.weight")
    ),
    "cohere2": made_of(
        lambda facts: layer_norm(facts) | windows(facts, 4), "cohere2", BIAS, logit_scale=factor("logit_scale")
    ),
    "nemotron": made_of(_nemotron, "nemotron", BIAS, MLP_BIAS, hidden_act="relu2"),
    "glm4": made_of(rms, "glm4", BIAS),
    "arcee": made_of(rms, "arcee", hidden_act="relu2"),
    "seed_oss": made_of(
        rms, "seed_oss", attention_bias=has("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        attention_out_bias=has("attn_output.bias"), residual_dropout=0.0,
    ),
    "gpt-oss": made_of(_gpt_oss, "gpt_oss", attention_bias=True),
    "exaone4": made_of(_exaone4, "exaone4"),
    "ernie4_5": made_of(rms, "ernie4_5", use_bias=HAS_BIAS),
    "hunyuan-dense": made_of(rms, "hunyuan_v1_dense", BIAS),
    "gptneox": made_of(
        layer_norm, "gpt_neox", hidden_act="gelu", hidden_dropout=0.0, attention_bias=has("attn_qkv.bias"),
        use_parallel_residual=lambda facts: facts.keys.need("gptneox.use_parallel_residual", bool),
    ),
    "falcon": made_of(
        _falcon, "falcon", new_decoder_architecture=False, parallel_attn=True, alibi=False, hidden_dropout=0.0,
        bias=has("attn_qkv.bias", "ffn_up.bias"),
    ),
    "glm4moe": made_of(_routed, "glm4_moe", BIAS, use_qk_norm=has("attn_q_norm.weight")),
    "dots1": made_of(_routed, "dots1", BIAS, sliding_window=None),
    "exaone-moe": _exaone_moe,
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax,
    "afmoe": _afmoe,
    "mistral3": _mistral3,
    "jais2": made_of(layer_norm, "jais2", BIAS, MLP_BIAS),
    **HYBRIDS,
}  # fmt: skip
"""What makes the config of each architecture, by llama.cpp's names."""
