"""Formats of weights: as a user names them, and as a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvkeep.errors import UsageError
from kvkeep.native.library import library

BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Format:
    """The format of a loaded model's weights."""

    dtype: torch.dtype
    """The dtype of activations, and of weights that are not packed."""
    packed: bool = False
    """Whether matrices are packed (models/packed.py)."""
    bits: int | None = None
    """Bits of packed matrices; None: those of a GGUF file."""


def chosen_format(weights: str, device: torch.device, gguf: bool, stated: torch.dtype) -> Format:
    """Return the format that ``weights`` means on ``device``, for a GGUF file or a model whose config states a dtype.

    auto: a GGUF file keeps its bits; bfloat16 stays so where the native library multiplies it; all else is float32 on a
    CPU, and as stored on an accelerator. Raises UsageError for a format that the device has no product for.
    """
    cpu = device.type == "cpu"
    if weights in BITS:
        if not cpu:
            raise UsageError(
                f"Weights in {weights} run on the cpu only, not on {device}; ask for bfloat16 or auto there."
            )
        return Format(torch.bfloat16, True, BITS[weights])
    if weights == "auto":
        if not cpu:
            return Format(torch.bfloat16 if gguf else stated)
        if gguf:
            return Format(torch.bfloat16, True)
        weights = "bfloat16" if stated == torch.bfloat16 and library() is not None else "float32"
    packed = weights == "bfloat16" and cpu and library() is not None
    return Format(getattr(torch, weights), packed, 16 if packed else None)
