"""The fingerprint of a model: what a saved cache may only be continued with."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from kvkeep.geometry import ModelGeometry


@torch.no_grad()
def fingerprint(model: Any) -> str:
    """Return 32 hex digits that differ where entries would differ: family, layers and windows, dtype and weights.

    Of every parameter some sixteen elements, evenly spread, are read: a fine-tuned or re-quantised copy differs, and
    a large model takes milliseconds.
    """
    geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
    digest = hashlib.sha256(repr(geometry).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 16)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
