"""The fingerprint of a model. A saved cache continues only with a model of the same fingerprint."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvkeep.geometry import ModelGeometry

_SETTINGS = ("rope", "rotary", "eps", "hidden_act", "activation", "softcap", "multiplier", "scal")
"""Parts of the names of settings that change keys. Other settings differ between versions of transformers."""

_Tensors = list[tuple[str, Tensor]]

_known: WeakKeyDictionary[Any, tuple[object, str]] = WeakKeyDictionary()
"""Fingerprints by model, each with what tells that the model has changed since."""
_fixed: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def fix(model: Any) -> None:
    """Compute the fingerprint of a model whose weights do not change until :func:`release`."""
    _fixed[model] = fingerprint(model)


def release(model: Any) -> None:
    """Let :func:`fingerprint` read the weights of a model again."""
    _fixed.pop(model, None)


@torch.no_grad()
def fingerprint(model: Any) -> str:
    """Return 32 hex digits of all that entries depend on: family, layers and windows, dtype, every byte of the weights,
    and the settings that are in no weight (rotation, norms, scales).

    The weights are read once for each model, at some GB/s. They are read again when :func:`sampled_fingerprint`, a
    tensor's place, or torch's count of its changes differs. Only a change that bypasses torch's count (through
    ``.data``, numpy or a pointer) and leaves all sampled elements as they were goes unseen in a model that has a
    fingerprint already.
    """
    if (known := _fixed.get(model)) is not None:
        return known
    tensors = _tensors(model)
    unchanged = (
        sampled_fingerprint(model),
        [(one.data_ptr(), 0 if one.is_inference() else one._version) for _, one in tensors],
    )
    if model in _known and _known[model][0] == unchanged:
        return _known[model][1]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        found = _digest(model, tensors, threads.map(lambda one: _checksum(one[1]), tensors))
    _known[model] = unchanged, found
    return found


@torch.no_grad()
def sampled_fingerprint(model: Any) -> str:
    """Return 32 hex digits as :func:`fingerprint`, of some sixteen elements of every parameter and buffer (packed
    weights are buffers). It takes milliseconds."""
    tensors = _tensors(model)
    return _digest(model, tensors, (_sample(one) for _, one in tensors))


def fingerprint_of_tokenizer(tokenizer: Any) -> str:
    """Return a tokenizer's fingerprint, 32 hex digits of its vocabulary, its merges and the rules by which it splits
    text; of a slow tokenizer, of its vocabulary."""
    rules = getattr(tokenizer, "backend_tokenizer", None)
    table = tokenizer.get_vocab() if rules is None else tokenizer.get_added_vocab()
    digest = hashlib.sha256(json.dumps(sorted(table.items(), key=itemgetter(1, 0))).encode())
    for name in ("normalizer", "pre_tokenizer", "model", "post_processor"):
        if (rule := getattr(rules, name, None)) is not None:
            digest.update(rule.__getstate__())
    return digest.hexdigest()[:32]


def _digest(model: Any, tensors: _Tensors, contents: Iterable[bytes]) -> str:
    """Return the digest of a model's settings, and of its tensors' names, forms and ``contents``."""
    geometry = ModelGeometry.of(model)
    digest = hashlib.sha256(repr(geometry).encode())
    settings = model.config.get_text_config().to_dict()
    relevant = {name: value for name, value in settings.items() if any(part in name for part in _SETTINGS)}
    digest.update(json.dumps(relevant, sort_keys=True, default=str).encode())
    for (name, tensor), content in zip(tensors, contents, strict=True):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _tensors(model: Any) -> _Tensors:
    saved = model.state_dict().keys()  # tables of positions are not, and may grow
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return sorted([*model.named_parameters(), *buffers], key=itemgetter(0))


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 16)].cpu()
    return bytes((sample.float() if sample.is_floating_point() else sample).numpy().tobytes())


def _checksum(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data).to_bytes(4, "little")


def name_of(model: Any) -> str:
    """Return the name of a model's file or folder, by which a person tells sessions apart; empty without one."""
    return str(model.name_or_path).rpartition("/")[2].removesuffix(".gguf")
