"""What transformers' configs of several architectures have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvkeep.models.gguf.facts import MAX_EXPERTS, Facts
from kvkeep.models.gguf.rope import positive, rope

Config = dict[str, Any]
Make = Callable[[Facts], Config]


def common(
    facts: Facts,
    layout: str = "",
    kv_heads: int | None = None,
    inner: int | None = None,
    rotary: Config | None = None,
) -> Config:
    """Return what nearly all architectures state. layout: the layout of tensors that the changes undo. kv_heads: the
    key heads of layers with attention, and inner the width of their MLPs, where layers differ. rotary: the RoPE
    parameters where only a part of each head is rotated; None: heads have one width, which the file states."""
    facts.expect("attention.causal", True, "runs only models whose tokens attend to earlier ones")
    facts.expect("tensor_data_layout", layout, "does not know that layout of tensors")
    return {
        "max_position_embeddings": facts.need("context_length"),
        "hidden_size": facts.width,
        "num_hidden_layers": facts.layers,
        "intermediate_size": facts.same("feed_forward_length") if inner is None else inner,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": kv_heads or facts.same("attention.head_count_kv", facts.heads),
        **({"head_dim": facts.head_dim} if rotary is None else {}),
        "rope_parameters": rope(facts) if rotary is None else rotary,
        "vocab_size": facts.vocabulary,
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "attention_dropout": 0.0,
    }


def rms(facts: Facts, **layers: Any) -> Config:
    """Return :func:`common`, of which ``layers`` are parameters, and the epsilon of RMSNorm."""
    return common(facts, **layers) | {"rms_norm_eps": epsilon(facts, "layer_norm_rms_epsilon")}


def layer_norm(facts: Facts) -> Config:
    """Return :func:`common`, and the epsilon of LayerNorm."""
    return common(facts) | {"layer_norm_eps": epsilon(facts, "layer_norm_epsilon")}


def epsilon(facts: Facts, name: str) -> float:
    """Return what is added to the variance in norms. Raises ModelError if the file states none."""
    facts.keys.need(f"{facts.architecture}.attention.{name}", float)
    return float(positive(facts, f"attention.{name}", 0.0))


def windows(facts: Facts, period: int, window: int | None = None) -> Config:
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
        slides = facts.flags("attention.sliding_window_pattern")
    if not size:
        return {"layer_types": ["full_attention"] * facts.layers}
    return {
        "sliding_window": size,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
    }


def expert_counts(facts: Facts, total: str = "num_experts") -> Config:
    """Return how many experts there are, as ``total``, and how many of them a token uses. Raises ModelError for absurd
    numbers."""
    count, used = facts.need("expert_count"), facts.count("expert_used_count", 0)
    if not 0 < used <= count <= MAX_EXPERTS:
        raise facts.keys.damaged(f"it states {str(count)[:20]} experts, of which {str(used)[:20]} are used")
    return {total: count, "num_experts_per_tok": used}


def sigmoid_routing(facts: Facts) -> None:
    """Raise ModelError unless experts are chosen by sigmoids, as families of these architectures always do."""
    facts.expect("expert_gating_func", 2, "supports only sigmoid routing in this architecture")


def made_of(base: Make, family: str, *parts: Mapping[str, Any], **settings: Any) -> Make:
    """Return what makes the config of a ``family``: what ``base`` reads, and these settings. A setting that can be
    called is given the facts."""
    stated = {"model_type": family, **settings}
    for part in parts:
        stated |= part

    def make(facts: Facts) -> Config:
        read = {name: value(facts) if callable(value) else value for name, value in stated.items()}
        return base(facts) | read

    return make


def has(*names: str) -> Callable[[Facts], bool]:
    """Return what finds out whether any layer has one of the tensors ``names``."""
    return lambda facts: facts.has(*names)


HAS_BIAS = has("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
BIAS = {"attention_bias": HAS_BIAS}
MLP_BIAS = {"mlp_bias": has("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")}


def factor(name: str) -> Callable[[Facts], float]:
    """Return what reads a factor; files state none, or 0, for 1."""
    return lambda facts: facts.number(name, 0.0) or 1.0


GRANITE: dict[str, Any] = {
    "embedding_multiplier": factor("embedding_scale"),
    "residual_multiplier": factor("residual_scale"),
    "attention_multiplier": lambda facts: facts.number("attention.scale", 0.0) or facts.head_dim**-0.5,
    "logits_scaling": factor("logit_scale"),
}


def routing(facts: Facts) -> Config:
    """Return how the weights of chosen experts are made."""
    return {
        "routed_scaling_factor": factor("expert_weights_scale")(facts),
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
        "n_group": facts.count("expert_group_count", 1),
        "topk_group": facts.count("expert_group_used_count", 1),
    }
