"""What was read of a GGUF file, and what it became: for a person who doubts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.models.gguf.facts import reason
from kvkeep.models.gguf.model import read_model
from kvkeep.models.gguf.tensors import CONFIGURING

_OTHERS = ("use_cache", "initializer_range", "pretraining_tp", "transformers_version", "dtype")
"""Settings of a config that no file states."""


@dataclass(frozen=True)
class ExplainedKey:
    """One key of a file."""

    key: str
    value: str
    """Its value, shortened."""
    use: str
    """"read", or why it changes no answer."""


@dataclass(frozen=True)
class ExplainedTensor:
    """One tensor of a file."""

    name: str
    kind: str
    """The kind of its blocks (Q4_1, F32)."""
    shape: tuple[int, ...]
    """The shape, rows first."""
    became: str
    """Its name in the model, or what else became of it."""
    in_memory: str
    """Its form in memory with weights auto on a CPU: the file's blocks, or bfloat16."""


@dataclass(frozen=True)
class Explanation:
    """All that was read of a file."""

    files: list[str]
    """The file, or all its parts."""
    architecture: str
    family: str
    """transformers' name of the family."""
    config: dict[str, Any]
    """transformers' config, without what is every config's."""
    tokenizer: dict[str, Any]
    """Kind, pre-tokenizer, size, special ids, ids that end an answer, names of chat templates."""
    keys: list[ExplainedKey]
    tensors: list[ExplainedTensor]


def explain(file: Path, pre: str | None = None) -> Explanation:
    """Return what was read of ``file``. pre: a pre-tokenizer in place of the file's. Raises the errors of
    :func:`~kvkeep.models.gguf.model.read_model`."""
    model = read_model(file, pre)
    tokenizer, facts, keys = model.tokenizer, model.facts, model.facts.keys
    template = tokenizer.chat_template
    about = {
        "model": keys.metadata.get("tokenizer.ggml.model"),
        "pre": model.pre or keys.metadata.get("tokenizer.ggml.pre", "default"),
        "tokens": len(tokenizer),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "begins_with": tokenizer("").input_ids,
        "ends": {str(one): tokenizer.convert_ids_to_tokens(one) for one in model.vocabulary.ends},
        "chat_templates": [*template] if isinstance(template, dict) else ["default"] if template else [],
    }
    weights = {part.name: tensor for tensor in model.tensors.values() for part in tensor.parts}
    tensors = []
    for name, stored in facts.tensors.items():
        became, memory = CONFIGURING.get(name, ""), ""
        if (weight := weights.get(name)) is not None:
            became, memory = weight.to, stored.kind if weight.packs else "BF16"
        tensors.append(ExplainedTensor(name, stored.kind, stored.shape, became, memory))
    used = [
        ExplainedKey(key, keys.shown(key), "read" if key in keys.read else reason(key, facts.architecture) or "")
        for key in keys.metadata
    ]
    settings = model.config.to_diff_dict().items()
    config = {name: value for name, value in settings if value is not None and name not in _OTHERS}
    parts = sorted({str(one.file) for one in facts.tensors.values()})
    return Explanation(parts, facts.architecture, model.config.model_type, config, about, used, tensors)
