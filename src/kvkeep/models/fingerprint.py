"""The fingerprint of a model: a saved cache continues only with an equal one."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from kvkeep.geometry import ModelGeometry


@torch.no_grad()
def fingerprint(model: Any) -> str:
    """Return 32 hex digits of all that entries depend on: family, layers and windows, dtype and weights.

    Some sixteen elements of every parameter are read: a fine-tuned or re-quantised copy differs; a large model takes
    milliseconds.
    """
    geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
    digest = hashlib.sha256(repr(geometry).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 16)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
