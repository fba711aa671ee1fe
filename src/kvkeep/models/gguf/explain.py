"""What was read of a GGUF file, and what it became: for a person who doubts it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvkeep.models.gguf.facts import reason
from kvkeep.models.gguf.model import GgufModel, read_model
from kvkeep.models.gguf.tensors import CONFIGURING, GgufTensor
from kvkeep.models.matrices import built, in_float32

_OTHERS = ("use_cache", "initializer_range", "pretraining_tp", "transformers_version", "dtype")
"""Settings of a config that no file states."""


def explain(file: Path, pre: str | None = None) -> dict[str, Any]:
    """Return what was read of ``file``, as plain types. pre: a pre-tokenizer in place of the file's. Raises the errors
    of :func:`~kvkeep.models.gguf.model.read_model`.

    Keys: ``files``, all parts; ``architecture``, and ``family``, its name in transformers; ``config``, transformers'
    without what is every config's; ``tokenizer``; ``keys``, each with its shortened value and its use ("read", or why
    it changes no answer); ``tensors``, each with the kind of its blocks (Q4_1, F32), its shape (rows first), what it
    became, and its form in memory with weights auto on a CPU.
    """
    model = read_model(file, pre)
    tokenizer, facts, keys = _tokenizer(model), model.facts, model.facts.keys
    weights = dict[str, list[GgufTensor]]()
    for weight in model.tensors.values():
        for part in weight.parts:
            weights.setdefault(part.name, []).append(weight)
    wide = re.compile("|".join(in_float32(built(model.config))))
    tensors = []
    for name, stored in facts.tensors.items():
        shown: dict[str, Any] = {"name": name, "kind": stored.kind, "shape": stored.shape}
        holds = weights.get(name, [])
        became = " and ".join(one.to for one in holds) or CONFIGURING.get(name, f"nothing: {facts.unused(name)}")
        memory = sorted({stored.kind if one.packs else "F32" if wide.search(one.to) else "BF16" for one in holds})
        tensors.append(shown | {"became": became, "in_memory": ", ".join(memory)})

    def used(key: str) -> str | None:
        return "read" if key in keys.read else reason(key, facts.architecture)

    settings = model.config.to_diff_dict().items()
    return {
        "files": sorted({str(one.file) for one in facts.tensors.values()}),
        "architecture": facts.architecture,
        "family": model.config.model_type,
        "config": {name: value for name, value in settings if value is not None and name not in _OTHERS},
        "tokenizer": tokenizer,
        "keys": [{"key": key, "value": keys.shown(key), "use": used(key)} for key in keys.metadata],
        "tensors": tensors,
    }


def _tokenizer(model: GgufModel) -> dict[str, Any]:
    tokenizer, metadata = model.tokenizer, model.facts.keys.metadata
    template = tokenizer.chat_template
    return {
        "model": metadata.get("tokenizer.ggml.model"),
        "pre": model.pre or metadata.get("tokenizer.ggml.pre", "default"),
        "tokens": len(tokenizer),
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "begins_with": tokenizer("").input_ids,
        "ends": {str(one): tokenizer.convert_ids_to_tokens(one) for one in model.vocabulary.ends},
        "chat_templates": [*template] if isinstance(template, dict) else ["default"] if template else [],
    }
