"""The tensors of each architecture: their names in the model by those in the file, and what llama.cpp's converter did
to them, undone: the order of rows, norms, transposed matrices, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.models.gguf.facts import Facts

Names = dict[str, str]


@dataclass(frozen=True)
class Change:
    """How the tensors of a file become one of the model."""

    values: Callable[[Sequence[Tensor]], Tensor]
    """Returns the model's values, of those of the file's tensors, float32."""
    order: Callable[[int], Tensor] | None = None
    """Returns, for a number of rows, the file's row of each row of the model, if rows are all that change. None:
    values change, too."""
    parts: int = 1
    """The number of the file's tensors that form one of the model."""


def pairs(heads: int) -> Change:
    """Rotated pairs: llama.cpp turns elements 2i and 2i + 1 of a head, transformers i and i + half the head."""

    def order(rows: int) -> Tensor:
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    return Change(lambda stored: stored[0][order(len(stored[0]))], order)


def grouped(heads: int, kv_heads: int) -> Change:
    """Queries, keys and values in one matrix: the file has all queries, all keys, all values; the model has a key and a
    value after the queries that use them."""

    def order(rows: int) -> Tensor:
        size = rows // (heads + 2 * kv_heads)
        parts = torch.arange(rows).split([heads * size, kv_heads * size, kv_heads * size])
        return torch.cat([part.view(kv_heads, -1, size) for part in parts], 1).flatten()

    return Change(lambda stored: stored[0][order(len(stored[0]))], order)


AS_STORED = Change(lambda stored: stored[0], lambda rows: torch.arange(rows))
LESS_ONE = Change(lambda stored: stored[0] - 1.0)
"""Norms that multiply by one more than their weight; the file stores the sum."""
TRANSPOSED = Change(lambda stored: stored[0].T.contiguous())
"""transformers' Conv1D has inputs before outputs."""
SHORT_CONVOLUTION = Change(lambda stored: stored[0][:, None])
"""(channels, kernel), with a dimension for groups in transformers."""
GATE_AND_UP = Change(lambda stored: torch.cat(tuple(stored), 1), parts=2)
"""Experts' gates and ups, (experts, inner, width) each, joined in one matrix of each expert."""
GATE_THEN_UP = Change(lambda stored: torch.cat(tuple(stored)), parts=2)
"""A gate and an up, (inner, width) each, joined in one matrix."""
EXPERTS_TRANSPOSED = Change(lambda stored: stored[0].transpose(1, 2).contiguous())
INTERLEAVED = Change(lambda stored: torch.stack(tuple(stored), -1).flatten(-2), parts=2)
"""Gates and ups of biases, each gate before its up."""
INTERLEAVED_TRANSPOSED = Change(
    lambda stored: torch.stack([one.transpose(1, 2) for one in stored], -1).flatten(-2).contiguous(), parts=2
)
"""The experts of gpt-oss: inputs before outputs, each gate before its up."""


_Changes = Change | Callable[[Facts], Change]
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp."""

    layer: Names
    """The name of each tensor of a layer in the model, by its name in the file; with a suffix where both have none."""
    top: Names = field(default_factory=lambda: TOP)
    """The same for the tensors outside of layers."""
    prefix: str = "model.layers."
    """The model's name before a layer's number."""
    changes: Mapping[str, _Changes] = field(default_factory=dict)
    """Changes of tensors of a layer, or what makes them of the file's facts, by the name in the file."""
    norms: Change = AS_STORED
    """The change of weights of norms."""


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
PAIRS: dict[str, _Changes] = {
    "attn_q": lambda facts: pairs(facts.heads),
    "attn_k": lambda facts: pairs(facts.same("attention.head_count_kv", facts.heads)),
}
MIXED: dict[str, _Changes] = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), GATE_AND_UP)

_LLAMA = ATTENTION | GATED
_PLAIN = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_LLAMA | EXPERTS, changes=PAIRS | MIXED),
    "qwen2": Architecture(_LLAMA),
    "qwen3": Architecture(_LLAMA | QK_NORMS),
    "qwen2moe": Architecture(
        _LLAMA | EXPERTS | {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        changes=MIXED,
    ),
    "qwen3moe": Architecture(_LLAMA | QK_NORMS | EXPERTS, changes=MIXED),
    "gemma": Architecture(_LLAMA, norms=LESS_ONE),
    "gemma2": Architecture(_LLAMA | SANDWICH, norms=LESS_ONE),
    "gemma3": Architecture(_LLAMA | QK_NORMS | SANDWICH, norms=LESS_ONE),
    "phi3": Architecture(_LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "phi2": Architecture(
        ATTENTION | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        TOP | {"output_norm": "model.final_layernorm"},
    ),
    "gpt2": Architecture(
        {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
         "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
         "output": "lm_head"},
        "transformer.h.",
        dict.fromkeys(("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"), TRANSPOSED),
    ),
    "starcoder2": Architecture(_LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": Architecture(_LLAMA),
    "granite": Architecture(_LLAMA, changes=PAIRS),
    "granitemoe": Architecture(
        _LLAMA | {
            name: to.replace("mlp.gate", "block_sparse_moe.router").replace("mlp.", "block_sparse_moe.")
            for name, to in EXPERTS.items()
        } | {
            "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight",
            "ffn_up_shexp.weight": "shared_mlp.input_linear.weight", "ffn_down_shexp": "shared_mlp.output_linear",
        },
        changes=PAIRS | MIXED | dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), GATE_THEN_UP),
    ),
    "olmo": Architecture(_LLAMA, changes=PAIRS),
    "olmo2": Architecture(_LLAMA | QK_NORMS | POST_NORMS),
    "olmoe": Architecture(_LLAMA | QK_NORMS | EXPERTS, changes=MIXED),
    "smollm3": Architecture(_LLAMA, changes=PAIRS),
    "command-r": Architecture(_LLAMA | QK_NORMS),
    "cohere2": Architecture(_LLAMA),
    "nemotron": Architecture(ATTENTION | _PLAIN, norms=LESS_ONE),
    "glm4": Architecture(
        _LLAMA | {
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        }
    ),
    "arcee": Architecture(ATTENTION | _PLAIN, changes=PAIRS),
    "seed_oss": Architecture(_LLAMA | {"post_attention_norm": "post_attention_layernorm"}),
    "gpt-oss": Architecture(
        ATTENTION | {
            "post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": "mlp.experts.gate_up_proj", "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias", "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
            "ffn_down_exps.weight": "mlp.experts.down_proj", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        changes={
            **dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), INTERLEAVED_TRANSPOSED),
            **dict.fromkeys(("ffn_gate_exps.bias", "ffn_up_exps.bias"), INTERLEAVED),
            "ffn_down_exps.weight": EXPERTS_TRANSPOSED,
        },
    ),
    "exaone4": Architecture(_LLAMA | QK_NORMS | POST_NORMS),
    "ernie4_5": Architecture(_LLAMA),
    "hunyuan-dense": Architecture(
        _LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
    "gptneox": Architecture(
        {"attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
         "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"},
        "gpt_neox.layers.",
        {"attn_qkv": lambda facts: grouped(facts.heads, facts.heads)},
    ),
    "falcon": Architecture(
        {"attn_norm": "input_layernorm", "attn_qkv": "self_attention.query_key_value",
         "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"},
        {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
        "transformer.h.",
        {"attn_qkv": lambda facts: grouped(facts.heads, facts.same("attention.head_count_kv", facts.heads))},
    ),
    "lfm2": Architecture(
        ATTENTION | {
            "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        changes={"shortconv.conv": SHORT_CONVOLUTION},
    ),
}  # fmt: skip
"""The architectures, by llama.cpp's names."""
