"""Layers of the shapes of published models, with random weights: how long a product takes does not depend on them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from kvkeep.errors import unknown

_SIZES: dict[str, tuple[Any, dict[str, int]]] = {
    "qwen2.5-0.5b": (
        Qwen2Config,
        {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "qwen2.5-1.5b": (
        Qwen2Config,
        {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    "qwen3-0.6b": (
        Qwen3Config,
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
}

SHAPES = tuple(_SIZES)
"""Of KV-Direct's Fig. 7 (DeepSeek-R1-Distill-Qwen-1.5B has the shape of Qwen2.5-1.5B), beside SmolLM2."""


def shaped(name: str, dtype: torch.dtype, device: torch.device, layers: int = 3) -> Any:
    """Return a model of ``layers`` random layers of the shape called ``name``; raises UsageError for other names."""
    if name not in _SIZES:
        raise unknown("shape", name, SHAPES)
    kind, sizes = _SIZES[name]
    config = kind(**sizes, num_hidden_layers=layers, vocab_size=256, max_position_embeddings=32768)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
