"""The shapes of published models: their configs, or layers with random weights, because the time of a product is
independent of the weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from kvkeep.errors import unknown

CheckpointKind = Literal["tokens", "residual", "kv"]


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_TABLE_1: dict[str, tuple[Any, dict[str, int]]] = {
    "smollm2-135m": (LlamaConfig, _sizes(576, 1536, 30, 9, 3)),
    "qwen2.5-0.5b": (Qwen2Config, _sizes(896, 4864, 24, 14, 2)),
    "qwen3-0.6b": (Qwen3Config, _sizes(1024, 3072, 28, 16, 8, head_dim=128)),
    "r1-distill-qwen-1.5b": (Qwen2Config, _sizes(1536, 8960, 28, 12, 2)),
    "qwen2.5-1.5b": (Qwen2Config, _sizes(1536, 8960, 28, 12, 2)),
    "gemma3-4b": (Gemma3TextConfig, _sizes(2560, 10240, 34, 8, 4, head_dim=256, sliding_window=1024)),
}
_SHAPES = _TABLE_1 | {
    "gemma3-12b": (Gemma3TextConfig, _sizes(3840, 15360, 48, 16, 8, head_dim=256, sliding_window=1024))
}

SHAPES = tuple(_TABLE_1)
"""The models of KV-Direct's Table 1."""


def _known(name: str) -> str:
    if name not in _SHAPES:
        raise unknown("shape", name, tuple(_SHAPES))
    return name


Shape = Annotated[str, AfterValidator(_known)]
"""A field that names a shape."""


def config_of(name: str, layers: int | None = None) -> Any:
    """Return the config of the shape called ``name``, with all its layers or the first ``layers``. Raises UsageError
    for other names. Its vocabulary is small; entries do not depend on it."""
    kind, sizes = _SHAPES[_known(name)]
    given = sizes if layers is None else {**sizes, "num_hidden_layers": layers}
    config = kind(**given, vocab_size=256, max_position_embeddings=32768)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return config


def weights_of(name: str) -> int:
    """Return the number of weights in the layers of the shape called ``name``, without embeddings and head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    return sum(weight.numel() for label, weight in model.named_parameters() if ".layers." in label)


def shaped(name: str, dtype: torch.dtype, device: torch.device, layers: int = 3) -> Any:
    """Return a model of ``layers`` random layers of the shape called ``name``; raises UsageError for other names."""
    return AutoModelForCausalLM.from_config(config_of(name, layers), dtype=dtype).to(device).eval()
