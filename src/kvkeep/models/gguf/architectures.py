"""The tensors of each architecture: their names in the model by those in the file, and what llama.cpp's converter did
to them, undone: the order of rows, norms, transposed matrices, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.models.gguf.facts import Facts

Names = Mapping[str, str] | Mapping[str, str | tuple[str, ...]]
"""The model's names by those of the file; several where a tensor of the file holds more than one weight."""


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
    kept: bool = False
    """Whether the library can multiply with the file's blocks although the model joins or transposes the tensors."""
    columns: Tensor | None = None
    """The file's column of each column of the model, if the columns are in another order."""


def rows(order: Callable[[int], Tensor]) -> Change:
    """Rows in another order, or some of them. order: as in :class:`Change`."""
    return Change(lambda stored: stored[0][order(len(stored[0]))], order)


def pairs(heads: int) -> Change:
    """Rotated pairs: llama.cpp turns elements 2i and 2i + 1 of a head, transformers i and i + half the head."""

    return rows(lambda count: torch.arange(count).view(heads, -1, 2).transpose(1, 2).flatten())


def grouped(heads: int, kv_heads: int) -> Change:
    """Queries, keys and values in one matrix: the file has all queries, all keys, all values; the model has a key and a
    value after the queries that use them."""

    def order(count: int) -> Tensor:
        size = count // (heads + 2 * kv_heads)
        parts = torch.arange(count).split([heads * size, kv_heads * size, kv_heads * size])
        return torch.cat([part.view(kv_heads, -1, size) for part in parts], 1).flatten()

    return rows(order)


def one_of(count: int, number: int) -> Change:
    """The matrix ``number`` of ``count`` that a tensor stacks, (count, rows, columns)."""

    def order(rows: int) -> Tensor:
        found = torch.arange(rows)
        return found if rows % count else found.view(count, -1)[number]  # of another shape: refused later

    return Change(lambda stored: stored[0][number] if len(stored[0]) == count else stored[0], order)


def value_heads(facts: Facts, width: int, before: int = 0) -> Tensor:
    """Return the file's row of each of the model's rows of value heads, ``width`` rows each, after ``before`` rows of
    other heads. Value head v uses key head v % keys in llama.cpp, and v // (values / keys) in transformers."""
    keys, values = facts.need("ssm.group_count"), facts.need("ssm.time_step_rank")
    if keys <= 0 or values <= 0 or values % keys:
        raise facts.keys.damaged(f"it states {values} value heads and {keys} key heads")
    found = torch.arange(values * width).view(-1, keys, width).transpose(0, 1).flatten()
    return torch.cat((torch.arange(before), before + found))


def of_value_heads(facts: Facts, channels: bool = False, after_keys: bool = False) -> Change:
    """Rows of value heads (:func:`value_heads`). channels: each has as many rows as a value has numbers, not one.
    after_keys: they follow queries and keys."""
    values = facts.need("ssm.time_step_rank")
    width = facts.need("ssm.inner_size") // max(values, 1) if channels else 1
    before = 2 * facts.need("ssm.group_count") * facts.need("ssm.state_size") if after_keys else 0
    order = value_heads(facts, width, before)
    return rows(lambda count: order if len(order) == count else torch.arange(count))  # of another shape: refused later


AS_STORED = Change(lambda stored: stored[0], lambda rows: torch.arange(rows))
LESS_ONE = Change(lambda stored: stored[0] - 1.0)
"""Norms that multiply by one more than their weight; the file stores the sum."""
TRANSPOSED = Change(lambda stored: stored[0].T.contiguous())
"""transformers' Conv1D has inputs before outputs."""
SHORT_CONVOLUTION = Change(lambda stored: stored[0][:, None])
"""(channels, kernel), with a dimension for groups in transformers."""
GATE_AND_UP = Change(lambda stored: torch.cat(tuple(stored), 1), parts=2, kept=True)
"""Experts' gates and ups, (experts, inner, width) each, joined in one matrix of each expert."""
GATE_THEN_UP = Change(lambda stored: torch.cat(tuple(stored)), parts=2, kept=True)
"""A gate and an up, (inner, width) each, joined in one matrix."""
EXPERTS_TRANSPOSED = Change(lambda stored: stored[0].transpose(1, 2).contiguous(), kept=True)
INTERLEAVED = Change(lambda stored: torch.stack(tuple(stored), -1).flatten(-2), parts=2)
"""Gates and ups of biases, each gate before its up."""
INTERLEAVED_TRANSPOSED = Change(
    lambda stored: torch.stack([one.transpose(1, 2) for one in stored], -1).flatten(-2).contiguous(),
    parts=2,
    kept=True,
)
"""The experts of gpt-oss: inputs before outputs, each gate before its up."""
FLAT = Change(lambda stored: stored[0].flatten())
LOGARITHM = Change(lambda stored: (-stored[0]).log().flatten())
"""A, which is negative; the model stores A_log = log(-A)."""
ONE_ROW = Change(lambda stored: stored[0].view(1, -1), lambda count: torch.arange(count))
"""A row of a matrix, which some converters write as a vector."""


def _columns(order: Tensor) -> Change:
    def values(stored: Sequence[Tensor]) -> Tensor:
        return stored[0][:, order] if stored[0].shape[-1] == len(order) else stored[0]

    return Change(values, lambda count: torch.arange(count), columns=order)


def _half_of_each(facts: Facts, half: int) -> Callable[[int], Tensor]:
    """Return the rows of the first or the second half of each key head's rows."""
    keys = facts.need("ssm.group_count")

    def order(count: int) -> Tensor:
        found = torch.arange(count)
        return found if keys <= 0 or count % (2 * keys) else found.view(keys, 2, -1)[:, half].flatten()

    return order


def _of_each(facts: Facts, *which: int) -> Callable[[int], Tensor]:
    """Return some of the rows of each key head, of which a matrix has query, key, values and gates; first those of the
    first kind, of all heads."""
    keys, width = facts.need("ssm.group_count"), facts.need("ssm.state_size")

    def order(count: int) -> Tensor:
        found = torch.arange(count)
        values = count // keys - 2 * width if keys > 0 and not count % keys else 0
        if values <= 0 or values % 2:
            return found
        parts = found.view(keys, -1).split([width, width, values // 2, values // 2], 1)
        return torch.cat([parts[one].flatten() for one in which])

    return order


def _then(change: Change, first: Change) -> Change:
    return Change(lambda stored: change.values([first.values(stored)]))


_Changes = Change | Callable[[Facts], Change | tuple[Change, ...]]
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
PER_LAYER = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
PER_LAYER_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
"""An embedding of tokens for each layer (Gemma 3n, Gemma 4)."""
PAIRS: dict[str, _Changes] = {
    "attn_q": lambda facts: pairs(facts.heads),
    "attn_k": lambda facts: pairs(facts.same("attention.head_count_kv", facts.heads)),
}
SOME_PAIRS: dict[str, _Changes] = {
    "attn_q": lambda facts: pairs(facts.heads),
    "attn_k": lambda facts: pairs(max(facts.each("attention.head_count_kv"))),
}
"""Of models in which some layers have no attention."""
MIXED: dict[str, _Changes] = dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), GATE_AND_UP)
SHARED = {
    f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
}  # fmt: skip
ROUTED = {**EXPERTS, **SHARED, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Experts beside a shared one, chosen with a bias."""
MAMBA2 = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_dt.bias": "mamba.dt_bias", "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
MAMBA2_CHANGES: dict[str, _Changes] = {
    "ssm_a": LOGARITHM, "ssm_d": FLAT, "ssm_norm": FLAT, "ssm_conv1d.weight": SHORT_CONVOLUTION,
}  # fmt: skip
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
TILED: dict[str, _Changes] = {
    "attn_qkv": lambda facts: of_value_heads(facts, channels=True, after_keys=True),
    "attn_gate": lambda facts: of_value_heads(facts, channels=True),
    "ssm_conv1d": lambda facts: _then(SHORT_CONVOLUTION, of_value_heads(facts, channels=True, after_keys=True)),
    "ssm_beta": of_value_heads,
    "ssm_alpha": of_value_heads,
    "ssm_dt.bias": of_value_heads,
    "ssm_a": lambda facts: _then(LOGARITHM, of_value_heads(facts)),
    "ssm_out": lambda facts: _columns(
        value_heads(facts, facts.need("ssm.inner_size") // facts.need("ssm.time_step_rank"))
    ),
}
"""Delta nets of Qwen 3.5, whose value heads are in another order."""
JOINED_KEYS_AND_VALUES = Change(
    lambda stored: torch.cat((stored[0].transpose(1, 2), stored[1]), 1).flatten(0, 1).contiguous(), parts=2
)
"""kv_b_proj, which expands latents to keys and values; its key part is (heads, latent, width) in the file."""
LATENT = ATTENTION | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b.weight": "self_attn.kv_b_proj.weight", "attn_v_b.weight": "self_attn.kv_b_proj.weight",
    "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip

_LLAMA = ATTENTION | GATED
_GRANITE_EXPERTS = {
    name: to.replace("mlp.gate", "block_sparse_moe.router").replace("mlp.", "block_sparse_moe.")
    for name, to in EXPERTS.items()
} | {
    "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight", "ffn_up_shexp.weight": "shared_mlp.input_linear.weight",
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
_GRANITE_SHARED: dict[str, _Changes] = dict.fromkeys(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), GATE_THEN_UP)
_LFM2 = ATTENTION | {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
}  # fmt: skip
_LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_NEMOTRON_H = Architecture(
    {name: to.replace("mamba.", "mixer.") for name, to in MAMBA2.items()}
    | {name: to.replace("self_attn.", "mixer.") for name, to in ATTENTION.items()}
    | {
        "attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj", "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias", "ffn_up_exps.weight": "mixer.experts.up_proj",
        "ffn_down_exps.weight": "mixer.experts.down_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    TOP | {"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
    changes=SOME_PAIRS | MAMBA2_CHANGES,
)  # fmt: skip
_PLAIN = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_LLAMA | EXPERTS, changes=PAIRS | MIXED),
    "qwen2": Architecture(_LLAMA),
    "qwen3": Architecture(_LLAMA | QK_NORMS),
    "qwen2moe": Architecture(
        _LLAMA | EXPERTS | SHARED_EXPERT, changes=MIXED | {"ffn_gate_inp_shexp": ONE_ROW}
    ),
    "qwen3moe": Architecture(_LLAMA | QK_NORMS | EXPERTS, changes=MIXED),
    "gemma": Architecture(_LLAMA, norms=LESS_ONE),
    "gemma2": Architecture(_LLAMA | SANDWICH, norms=LESS_ONE),
    "gemma3": Architecture(_LLAMA | QK_NORMS | SANDWICH, norms=LESS_ONE),
    "gemma3n": Architecture(
        _LLAMA | QK_NORMS | SANDWICH | PER_LAYER | {
            "altup_predict_coef": "altup.prediction_coefs", "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale", "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm",
        },
        TOP | PER_LAYER_TOP | {
            "altup_proj.weight": tuple(f"model.altup_projections.{one}.weight" for one in range(3)),
            "altup_unembd_proj.weight": tuple(f"model.altup_unembed_projections.{one}.weight" for one in range(3)),
        },
        changes=dict.fromkeys(
            ("altup_proj.weight", "altup_unembd_proj.weight"), lambda _: tuple(one_of(3, number) for number in range(3))
        ),
    ),
    "gemma4": Architecture(
        _LLAMA | QK_NORMS | SANDWICH | PER_LAYER | {"layer_output_scale.weight": "layer_scalar"}, TOP | PER_LAYER_TOP
    ),
    "deepseek2": Architecture(
        LATENT | GATED | ROUTED,
        changes=MIXED | dict.fromkeys(("attn_k_b.weight", "attn_v_b.weight"), JOINED_KEYS_AND_VALUES),
    ),
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
    "granitemoe": Architecture(_LLAMA | _GRANITE_EXPERTS, changes=PAIRS | MIXED | _GRANITE_SHARED),
    "granitehybrid": Architecture(
        _LLAMA | MAMBA2 | _GRANITE_EXPERTS | {
            "ffn_gate.weight": "shared_mlp.input_linear.weight", "ffn_up.weight": "shared_mlp.input_linear.weight",
            "ffn_down": "shared_mlp.output_linear",
        },
        changes=SOME_PAIRS | MIXED | MAMBA2_CHANGES | _GRANITE_SHARED
        | dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), GATE_THEN_UP),
    ),
    "falcon-h1": Architecture(
        ATTENTION | MAMBA2 | {
            "ffn_norm": "pre_ff_layernorm.weight", "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
        },
        TOP | {"output_norm": "model.final_layernorm"},
        changes=MAMBA2_CHANGES,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "qwen3next": Architecture(
        ATTENTION | QK_NORMS | EXPERTS | SHARED_EXPERT | DELTA_NET | {
            "ssm_ba.weight": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
            "ssm_in.weight": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),  # of older files
        },
        changes=MIXED | {
            "ssm_ba.weight": lambda facts: tuple(rows(_half_of_each(facts, half)) for half in range(2)),
            "ssm_in.weight": lambda facts: (rows(_of_each(facts, 0, 1, 2)), rows(_of_each(facts, 3))),
            "ssm_a": LOGARITHM, "ssm_conv1d": SHORT_CONVOLUTION, "ffn_gate_inp_shexp": ONE_ROW,
        },
        norms=LESS_ONE,
    ),
    "qwen35": Architecture(_LLAMA | QK_NORMS | DELTA_NET, changes=TILED, norms=LESS_ONE),
    "qwen35moe": Architecture(
        ATTENTION | QK_NORMS | EXPERTS | SHARED_EXPERT | DELTA_NET,
        changes=MIXED | TILED | {"ffn_gate_inp_shexp": ONE_ROW}, norms=LESS_ONE,
    ),
    "glm4moe": Architecture(
        _LLAMA | QK_NORMS | ROUTED | {"post_attention_norm": "post_attention_layernorm"}, changes=MIXED
    ),
    "dots1": Architecture(_LLAMA | QK_NORMS | ROUTED, changes=MIXED),
    "exaone-moe": Architecture(_LLAMA | QK_NORMS | ROUTED, changes=MIXED),
    "ernie4_5-moe": Architecture(
        _LLAMA | ROUTED | {"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
        changes=MIXED | {"exp_probs_b.bias": ONE_ROW},
    ),
    "hunyuan-moe": Architecture(
        _LLAMA | EXPERTS | {
            "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj", "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        changes=MIXED,
    ),
    "minimax-m2": Architecture(
        _LLAMA | QK_NORMS | EXPERTS | {"exp_probs_b.bias": "mlp.e_score_correction_bias"}, changes=MIXED
    ),
    "afmoe": Architecture(
        _LLAMA | QK_NORMS | ROUTED | {
            "attn_gate": "self_attn.gate_proj", "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm", "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        changes=MIXED,
    ),
    "mistral3": Architecture(_LLAMA, changes=PAIRS),
    "jais2": Architecture(ATTENTION | _PLAIN),
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
    "lfm2": Architecture(_LFM2, _LFM2_TOP, changes={"shortconv.conv": SHORT_CONVOLUTION}),
    "lfm2moe": Architecture(
        _LFM2 | {name: to.replace("mlp.", "feed_forward.") for name, to in EXPERTS.items()}
        | {"exp_probs_b.bias": "feed_forward.expert_bias"},
        _LFM2_TOP,
        changes=MIXED | {"shortconv.conv": SHORT_CONVOLUTION},
    ),
}  # fmt: skip
"""The architectures, by llama.cpp's names."""
