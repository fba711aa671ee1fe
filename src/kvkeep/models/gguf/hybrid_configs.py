"""transformers' config of each architecture with recurrent layers, of the file's keys and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvkeep.models.gguf.config_parts import (
    BIAS,
    GRANITE,
    HAS_BIAS,
    Config,
    Make,
    expert_counts,
    made_of,
    rms,
    routing,
    sigmoid_routing,
)
from kvkeep.models.gguf.facts import Facts


def _some_layers(facts: Facts, inner: int | None = None, rotary: Config | None = None) -> tuple[Config, list[int]]:
    """Return what nearly all architectures state, and the key heads of each layer: none where it has no attention.
    inner, rotary: as in :func:`~kvkeep.models.gguf.config_parts.common`."""
    heads = facts.each("attention.head_count_kv")
    return rms(facts, kv_heads=max(heads), inner=inner, rotary=rotary), heads


def _mamba2(facts: Facts) -> Config:
    """Return the sizes of Mamba-2 layers, by the names of most families."""
    heads, inner = facts.need("ssm.time_step_rank"), facts.need("ssm.inner_size")
    if heads <= 0 or inner <= 0 or inner % heads:
        raise facts.keys.damaged(f"it states {heads} heads of a Mamba-2 layer for {inner} channels")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": facts.need("ssm.group_count"),
        "mamba_d_state": facts.need("ssm.state_size"),
        "mamba_d_conv": facts.need("ssm.conv_kernel"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
        "mamba_proj_bias": facts.has("ssm_in.bias", "ssm_out.bias"),
    }


def _granitehybrid(facts: Facts) -> Config:
    made, heads = _some_layers(facts)
    facts.expect("ssm.inner_size", 2 * facts.width, "runs only Mamba-2 layers of twice the width in this architecture")
    shared = facts.same("expert_shared_feed_forward_length", 0)
    if facts.count("expert_count", 0):
        experts = expert_counts(facts, "num_local_experts")
    else:
        experts = {"num_local_experts": 0, "num_experts_per_tok": facts.count("expert_used_count", 0)}
    return made_of(lambda _: made, "granitemoehybrid", BIAS, GRANITE)(facts) | _mamba2(facts) | experts | {
        "mamba_expand": 2,
        "layer_types": ["full_attention" if one else "linear_attention" for one in heads],
        "shared_intermediate_size": shared if experts["num_local_experts"] else facts.same("feed_forward_length"),
        "position_embedding_type": "rope" if facts.flag("rope.scaling.finetuned", True) else None,
    }  # fmt: skip


def _falcon_h1(facts: Facts) -> Config:
    """The converter multiplies its factors into the matrices."""
    return rms(facts) | _mamba2(facts) | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": facts.need("ssm.inner_size"),
        "mamba_rms_norm": facts.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }  # fmt: skip


def _nemotron_h(facts: Facts) -> Config:
    facts.number("attention.layer_norm_epsilon")  # the converter writes the epsilon twice
    spaces, inner = _mamba2(facts), facts.each("feed_forward_length")
    facts.count("rope.dimension_count")  # no layer has rotary embeddings
    facts.number("rope.freq_base")
    made, heads = _some_layers(facts, max(inner), {})
    made["head_dim"], made["layer_norm_epsilon"] = facts.head_dim, made.pop("rms_norm_eps")
    experts = bool(facts.count("expert_count", 0))
    names = {
        "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
    }  # fmt: skip
    feeds = "moe" if experts else "mlp"
    made |= {
        "model_type": "nemotron_h",
        **{name: spaces[of] for name, of in names.items()},
        "layers_block_type": [
            "full_attention" if one else feeds if width else "linear_attention"
            for one, width in zip(heads, inner, strict=True)
        ],
        "attention_bias": HAS_BIAS(facts),
        "time_step_min": 1e-30,  # transformers takes its logarithm
    }
    if not experts:
        return made
    sigmoid_routing(facts)
    return made | routing(facts) | expert_counts(facts, "n_routed_experts") | {
        "n_shared_experts": facts.need("expert_shared_count"),
        "moe_intermediate_size": facts.same("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": facts.same("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _delta_net(facts: Facts, inner: int | None = None) -> Config:
    heads, channels = facts.need("ssm.time_step_rank"), facts.need("ssm.inner_size")
    if heads <= 0 or channels <= 0 or channels % heads:
        raise facts.keys.damaged(f"it states {heads} value heads for {channels} channels")
    return rms(facts, inner=inner) | {
        "linear_conv_kernel_dim": facts.need("ssm.conv_kernel"),
        "linear_key_head_dim": facts.need("ssm.state_size"),
        "linear_num_key_heads": facts.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": channels // heads,
        "layer_types": [
            "linear_attention" if one else "full_attention"
            for one in facts.kinds("attention.recurrent_layers", "full_attention_interval", 4)
        ],
    }  # fmt: skip


def _qwen35(facts: Facts, inner: int | None = None) -> Config:
    made = _delta_net(facts, inner)
    sections = facts.keys.items(f"{facts.architecture}.rope.dimension_sections", int)
    if not sections:
        raise facts.keys.damaged("it states no rope.dimension_sections")
    made["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return made


def _shared_expert(facts: Facts, base: Callable[[Facts, int], Config]) -> Config:
    """Return the config of a mixture, which need not state the width of dense MLPs, as it has none."""
    width = facts.same("expert_feed_forward_length")
    return base(facts, facts.same("feed_forward_length", width)) | expert_counts(facts) | {
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": facts.same("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _lfm2(facts: Facts) -> Config:
    made, heads = _some_layers(facts)
    made["norm_eps"] = made.pop("rms_norm_eps")
    return made | {
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "conv_L_cache": facts.need("shortconv.l_cache"),
        "conv_bias": facts.has("shortconv.in_proj.bias"),
    }


def _lfm2moe(facts: Facts) -> Config:
    sigmoid_routing(facts)
    return _lfm2(facts) | expert_counts(facts) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "moe_intermediate_size": facts.same("expert_feed_forward_length"),
    }  # fmt: skip


HYBRIDS: Mapping[str, Make] = {
    "lfm2": made_of(_lfm2, "lfm2", block_auto_adjust_ff_dim=False),
    "lfm2moe": _lfm2moe,
    "granitehybrid": _granitehybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    # Its matrices are split as those of Qwen 3.5, which computes the same.
    "qwen3next": made_of(lambda facts: _shared_expert(facts, _delta_net), "qwen3_5_moe_text"),
    "qwen35": made_of(_qwen35, "qwen3_5_text"),
    "qwen35moe": made_of(lambda facts: _shared_expert(facts, _qwen35), "qwen3_5_moe_text"),
}  # fmt: skip
"""What makes these configs, by llama.cpp's names."""
