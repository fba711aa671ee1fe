"""The architectures of GGUF files that kvkeep reads: the config and the tensors' names of each, in the file's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.gguf import configs
from kvkeep.models.gguf.changes import (
    AS_STORED,
    EXPERTS_TRANSPOSED,
    GATE_AND_UP,
    GATE_THEN_UP,
    INTERLEAVED,
    INTERLEAVED_TRANSPOSED,
    LESS_ONE,
    SHORT_CONVOLUTION,
    TRANSPOSED,
    Change,
    grouped,
    pairs,
)
from kvkeep.models.gguf.facts import Facts

Config = dict[str, Any]
Names = Mapping[str, str]


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp."""

    config: Callable[[Facts], Config]
    """Returns transformers' config, with its ``model_type``."""
    layer: Names
    """The name of each tensor of a layer in the model, by its name in the file; with a suffix where both have none."""
    top: Names
    """The same for the tensors outside of layers."""
    prefix: str = "model.layers."
    """The model's name before a layer's number."""
    changes: Mapping[str, Callable[[Facts], Change]] = field(default_factory=dict)
    """Changes of tensors of a layer, by the name in the file."""
    norms: Change = AS_STORED
    """The change of weights of norms."""


def architecture_of(name: str, file: Any) -> Architecture:
    """Return the architecture called ``name``. Raises UnsupportedModelError for one that kvkeep does not read."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"'{file}' has the architecture {name[:40]!r}; kvkeep reads GGUF files of {', '.join(ARCHITECTURES)}. Load "
            "the model from a folder or the hub, if transformers has it."
        )
    return ARCHITECTURES[name]


def joined(names: Names, *others: Names) -> dict[str, str]:
    """Return the names of several tables; a later one replaces."""
    made = dict(names)
    for other in others:
        made |= other
    return made


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GATED = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH = {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
PAIRS = {
    "attn_q": lambda facts: pairs(facts.heads),
    "attn_k": lambda facts: pairs(facts.same("attention.head_count_kv", facts.heads)),
}
MIXED = {
    "ffn_gate_exps.weight": lambda facts: GATE_AND_UP,
    "ffn_up_exps.weight": lambda facts: GATE_AND_UP,
}


_LLAMA = joined(ATTENTION, GATED)
_PLAIN = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GPT2_TOP = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(configs.llama, joined(_LLAMA, EXPERTS), TOP, changes=PAIRS | MIXED),
    "qwen2": Architecture(configs.qwen2, _LLAMA, TOP),
    "qwen3": Architecture(configs.qwen3, joined(_LLAMA, QK_NORMS), TOP),
    "qwen2moe": Architecture(
        configs.qwen2moe,
        joined(_LLAMA, EXPERTS, {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
        }),
        TOP,
        changes=MIXED,
    ),
    "qwen3moe": Architecture(configs.qwen3moe, joined(_LLAMA, QK_NORMS, EXPERTS), TOP, changes=MIXED),
    "gemma": Architecture(configs.gemma, _LLAMA, TOP, norms=LESS_ONE),
    "gemma2": Architecture(configs.gemma2, joined(_LLAMA, SANDWICH), TOP, norms=LESS_ONE),
    "gemma3": Architecture(configs.gemma3, joined(_LLAMA, QK_NORMS, SANDWICH), TOP, norms=LESS_ONE),
    "phi3": Architecture(
        configs.phi3,
        joined(_LLAMA, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
        TOP,
    ),
    "phi2": Architecture(
        configs.phi2,
        joined(ATTENTION, {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        joined(TOP, {"output_norm": "model.final_layernorm"}),
    ),
    "gpt2": Architecture(
        configs.gpt2,
        {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
         "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _GPT2_TOP,
        "transformer.h.",
        {f"{name}.weight": lambda facts: TRANSPOSED for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
    ),
    "starcoder2": Architecture(
        configs.starcoder2, joined(ATTENTION, GATED, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}), TOP
    ),
    "stablelm": Architecture(configs.stablelm, _LLAMA, TOP),
    "granite": Architecture(configs.granite, _LLAMA, TOP, changes=PAIRS),
    "granitemoe": Architecture(
        configs.granitemoe,
        joined(_LLAMA, {
            name: to.replace("mlp.gate", "block_sparse_moe.router").replace("mlp.", "block_sparse_moe.")
            for name, to in EXPERTS.items()
        }, {
            "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight",
            "ffn_up_shexp.weight": "shared_mlp.input_linear.weight", "ffn_down_shexp": "shared_mlp.output_linear",
        }),
        TOP,
        changes=PAIRS | MIXED | {
            "ffn_gate_shexp.weight": lambda facts: GATE_THEN_UP, "ffn_up_shexp.weight": lambda facts: GATE_THEN_UP,
        },
    ),
    "olmo": Architecture(configs.olmo, _LLAMA, TOP, changes=PAIRS),
    "olmo2": Architecture(configs.olmo2, joined(_LLAMA, QK_NORMS, POST_NORMS), TOP),
    "olmoe": Architecture(configs.olmoe, joined(_LLAMA, QK_NORMS, EXPERTS), TOP, changes=MIXED),
    "smollm3": Architecture(configs.smollm3, _LLAMA, TOP, changes=PAIRS),
    "command-r": Architecture(configs.cohere, joined(_LLAMA, QK_NORMS), TOP),
    "cohere2": Architecture(configs.cohere2, _LLAMA, TOP),
    "nemotron": Architecture(configs.nemotron, joined(ATTENTION, _PLAIN), TOP, norms=LESS_ONE),
    "glm4": Architecture(
        configs.glm4,
        joined(_LLAMA, {
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        }),
        TOP,
    ),
    "arcee": Architecture(configs.arcee, joined(ATTENTION, _PLAIN), TOP, changes=PAIRS),
    "seed_oss": Architecture(
        configs.seed_oss, joined(_LLAMA, {"post_attention_norm": "post_attention_layernorm"}), TOP
    ),
    "gpt-oss": Architecture(
        configs.gpt_oss,
        joined(ATTENTION, {
            "post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj", "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias", "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.weight": "mlp.experts.down_proj", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        }),
        TOP,
        changes={
            "ffn_gate_exps.weight": lambda facts: INTERLEAVED_TRANSPOSED,
            "ffn_up_exps.weight": lambda facts: INTERLEAVED_TRANSPOSED,
            "ffn_gate_exps.bias": lambda facts: INTERLEAVED,
            "ffn_up_exps.bias": lambda facts: INTERLEAVED,
            "ffn_down_exps.weight": lambda facts: EXPERTS_TRANSPOSED,
        },
    ),
    "exaone4": Architecture(configs.exaone4, joined(_LLAMA, QK_NORMS, POST_NORMS), TOP),
    "ernie4_5": Architecture(configs.ernie4_5, _LLAMA, TOP),
    "hunyuan-dense": Architecture(
        configs.hunyuan,
        joined(_LLAMA, {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}),
        TOP,
    ),
    "gptneox": Architecture(
        configs.gptneox,
        {"attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
         "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"},
        "gpt_neox.layers.",
        {"attn_qkv": lambda facts: grouped(facts.heads, facts.heads)},
    ),
    "falcon": Architecture(
        configs.falcon,
        {"attn_norm": "input_layernorm", "attn_qkv": "self_attention.query_key_value",
         "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
        "transformer.h.",
        {"attn_qkv": lambda facts: grouped(facts.heads, facts.same("attention.head_count_kv", facts.heads))},
    ),
    "lfm2": Architecture(
        configs.lfm2,
        joined(ATTENTION, {
            "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        }),
        {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        changes={"shortconv.conv": lambda facts: SHORT_CONVOLUTION},
    ),
}  # fmt: skip
"""The architectures, by llama.cpp's names."""
