"""The fingerprint of a model. A saved cache continues only with a model of the same fingerprint."""

from __future__ import annotations

import hashlib
import json
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvkeep.geometry import ModelGeometry

_SETTINGS = ("rope", "rotary", "eps", "hidden_act", "activation", "softcap", "multiplier", "scal")
"""Parts of the names of settings that change keys. Other settings differ between versions of transformers."""


_fixed: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def fix(model: Any) -> None:
    """Compute the fingerprint of a model whose weights do not change until :func:`release`."""
    _fixed[model] = fingerprint(model)


def release(model: Any) -> None:
    """Let :func:`fingerprint` read the weights of a model again."""
    _fixed.pop(model, None)


@torch.no_grad()
def fingerprint(model: Any) -> str:
    """Return 32 hex digits of all that entries depend on: family, layers and windows, dtype, weights, and the settings
    that are in no weight (rotation, norms, scales).

    The function reads some sixteen elements of every parameter and buffer (packed weights are buffers). So the
    fingerprint of a fine-tuned or re-quantised copy differs, and a large model takes milliseconds.
    """
    if (known := _fixed.get(model)) is not None:
        return known
    geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
    digest = hashlib.sha256(repr(geometry).encode())
    settings = model.config.get_text_config().to_dict()
    relevant = {name: value for name, value in settings.items() if any(part in name for part in _SETTINGS)}
    digest.update(json.dumps(relevant, sort_keys=True, default=str).encode())
    saved = model.state_dict().keys()  # excludes tables of positions, which may grow
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    for name, tensor in sorted([*model.named_parameters(), *buffers], key=itemgetter(0)):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 16)].cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update((sample.float() if sample.is_floating_point() else sample).numpy().tobytes())
    return digest.hexdigest()[:32]


def fingerprint_of_tokenizer(tokenizer: Any) -> str:
    """Return a tokenizer's fingerprint, 32 hex digits of its vocabulary."""
    table = sorted(tokenizer.get_vocab().items(), key=itemgetter(1, 0))
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:32]
