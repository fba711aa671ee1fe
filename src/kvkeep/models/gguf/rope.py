"""Rotary embeddings of a GGUF file, as transformers' ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

from kvkeep.errors import ModelError, UnsupportedModelError
from kvkeep.models.gguf.facts import Facts

FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_THETA = 10_000.0
"""llama.cpp's base where a file states none."""
_PARTIAL = (
    "glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi2", "phi3", "qwen35", "qwen35moe", "qwen3next",
    "stablelm",
)  # fmt: skip
"""Architectures whose models in transformers rotate a part of each head if the config says so; others rotate all."""


def rope(facts: Facts, width: int | None = None) -> dict[str, Any]:
    """Return the parameters of the rotary embeddings of a file: base, rotated part, and scaling by keys or by tensors.
    width: the elements of a head that can be rotated; None: all.

    Factors in the tensor rope_freqs divide the frequencies; transformers divides them likewise for its type longrope,
    which has one list of factors for short texts and one for long ones: both are the file's. Raises
    UnsupportedModelError for scaling of another kind.
    """
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": positive(facts, "rope.freq_base", _THETA)}
    width = facts.head_dim if width is None else width
    rotated = facts.count("rope.dimension_count", width)
    if not 0 < rotated <= width or rotated % 2:
        raise facts.keys.damaged(
            f"its {facts.architecture}.rope.dimension_count is {rotated}, and each of its {facts.heads} heads has "
            f"{width} elements"
        )
    if facts.architecture in _PARTIAL:
        made["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise UnsupportedModelError(
            f"'{facts.keys.file}' rotates {rotated} of the {width} elements of a head "
            f"({facts.architecture}.rope.dimension_count), which kvkeep does not run in the architecture "
            f"'{facts.architecture}'."
        )
    return made | _scaling(facts, rotated // 2)


def _scaling(facts: Facts, pairs: int) -> dict[str, Any]:
    kind = facts.keys.get(f"{facts.architecture}.rope.scaling.type", str, "linear")
    old = positive(facts, "rope.scale_linear", 1.0, none=0.0)
    factor = positive(facts, "rope.scaling.factor", old, none=0.0) or 1.0
    attention = positive(facts, "rope.scaling.attn_factor", 1.0)
    original = facts.count("rope.scaling.original_context_length", facts.need("context_length"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"'{facts.keys.file}' scales its positions by {kind[:40]!r}; kvkeep reads none, linear, yarn and longrope."
        )
    tensors = _factors(facts, pairs)
    if tensors:
        if kind == "yarn" or (kind != "none" and factor != 1.0):
            raise UnsupportedModelError(
                f"'{facts.keys.file}' scales its positions by factors in tensors and by '{kind}', and kvkeep reads one "
                "of both."
            )
        return tensors | {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": attention,
            "original_max_position_embeddings": original,
        }
    if kind == "yarn":
        for key in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            facts.number(f"rope.scaling.{key}")  # llama.cpp applies its defaults in these architectures
        if original <= 2 * math.pi:  # not even the fastest pair turns once, and formulas of the ramp differ
            raise facts.keys.damaged(
                f"its {facts.architecture}.rope.scaling.original_context_length is {original}, too few for yarn"
            )
        return {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": attention * (1.0 + 0.1 * math.log(max(1.0, factor))),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": original,
        }
    if attention != 1.0:
        raise UnsupportedModelError(
            f"'{facts.keys.file}' states a rope.scaling.attn_factor of {attention}, which kvkeep reads with yarn and "
            "longrope only."
        )
    return {"rope_type": "linear", "factor": factor} if kind != "none" and factor != 1.0 else {}


def positive(facts: Facts, key: str, default: float, none: float | None = None) -> Any:
    """Return a number of the file that is positive, or ``none``. Raises ModelError for another one."""
    stated = facts.number(key, default)
    if stated != none and not 0 < stated < math.inf:
        raise facts.keys.damaged(f"its {facts.architecture}.{key} is {stated}, and must be positive")
    return stated


def _factors(facts: Facts, pairs: int) -> dict[str, list[float]]:
    """Return the factors of short and long texts, if tensors state them; all layers share them."""
    named = [name for name in (FACTORS, LONG, SHORT) if name in facts.tensors]
    if not named:
        return {}
    if named not in ([FACTORS], [LONG, SHORT]):
        raise ModelError(f"'{facts.keys.file}' has {' and '.join(named)}, which cannot be read together.")
    found = {name: facts.values(name).flatten().tolist() for name in named}
    for name, factors in found.items():
        if len(factors) != pairs or not all(0 < one < math.inf for one in factors):
            raise facts.keys.damaged(
                f"its {name} has {len(factors)} factors, or one that is not positive, and {pairs} pairs are rotated"
            )
    return {
        "short_factor": found.get(SHORT, found.get(FACTORS, [])),
        "long_factor": found.get(LONG, found.get(FACTORS, [])),
    }
