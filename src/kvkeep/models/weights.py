"""Reads a model's weights, and refuses files that lack some.

transformers reads a folder or a hub id. The model of a GGUF file is built without memory, then filled tensor by tensor:
transformers' loader first compiles the renamings of every checkpoint format, which takes longer than reading a small
model. The model computes tensors missing in the file (tables of positions), and transformers ties weights.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.errors import ModelError
from kvkeep.models.gguf.tensors import GgufTensor
from kvkeep.models.matrices import without_memory
from kvkeep.models.packing import Packer, Packing
from kvkeep.models.weight_memory import Format


def read_weights(kind: Any, source: str | os.PathLike[str] | None, name: str, **options: Any) -> Any:
    """Return ``kind.from_pretrained(source, **options)``, refusing incomplete files. Weights on the CPU are in memory
    of this process: those that transformers returns lie in mapped files, and change with them.

    transformers initialises missing weights at random, and only logs that. Raises ModelError, with ``name``, when a
    weight is missing, or its shape differs from config.json.
    """
    # Wrong shapes are reported below, because transformers only logs them.
    model, report = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    refuse_incomplete(name, report["missing_keys"], [entry[0] for entry in report["mismatched_keys"]])
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and type(tensor.data) is Tensor:
            tensor.data = tensor.data.clone()
    return model


def refuse_incomplete(name: str, missing: Iterable[str], other: Iterable[str]) -> None:
    """Raise ModelError, with ``name``, for weights that are ``missing``, and for ``other`` ones of a wrong shape."""
    for what, keys in (("it lacks", sorted(missing)), ("its config states another shape for", sorted(other))):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(
                f"The model '{name}' is damaged or incomplete: {what} {keys[0]}{more}; get its files again."
            )


@torch.no_grad()
def filled(name: str, kind: Any, config: Any, tensors: Mapping[str, GgufTensor], form: Format) -> Any:
    """Return the model ``name`` of class ``kind``, in eval mode. tensors: its weights by the model's names. A bias that
    the file lacks is zero.

    Raises ModelError for a missing weight, or a weight whose shape differs from the config.
    """
    with without_memory():
        model = kind._from_config(copy.deepcopy(config), dtype=form.dtype)
    packer = None
    if form.packed:
        packer = Packer(Packing(form.bits), pre_quantized=False)
        packer._process_model_before_weight_loading(model)
    places = model.state_dict(keep_vars=True)
    missing, tied = places.keys() - tensors.keys(), model.all_tied_weights_keys
    biases = {one for one in missing if one.endswith(".bias")}
    refuse_incomplete(name, [one for one in missing - biases if tied.get(one) not in tensors], [])
    wide = model._get_dtype_plan(form.dtype)
    for to in [one for one in places if one in tensors or one in biases]:
        place = places[to]
        dtype = next((wide[part] for part in wide if re.search(part.replace("*", ".*"), to)), place.dtype)
        if to in biases:
            right = _put(model, to, torch.zeros(place.shape, dtype=dtype), place)
        elif packer is not None and packer.param_needs_quantization(model, to):
            kept = form.bits is None and tensors[to].packs
            right = packer.pack(to, tensors[to].blocks() if kept else tensors[to].dense().to(dtype), place)
        else:
            right = _put(model, to, tensors[to].dense().to(dtype), place)
        refuse_incomplete(name, [], [] if right else [to])
    _complete(model, missing)
    return model.eval() if packer is None else packer._process_model_after_weight_loading(model.eval())


def _put(model: nn.Module, name: str, value: Tensor, place: Tensor) -> bool:
    """Put ``value`` in place of the weight ``name``; return whether the shapes agree."""
    if value.shape != place.shape:
        return False
    module, _, attribute = name.rpartition(".")
    made = nn.Parameter(value, requires_grad=True) if isinstance(place, nn.Parameter) else value
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(model.get_submodule(module), attribute, made)
    return True


def _complete(model: Any, missing: set[str]) -> None:
    """Compute unsaved buffers, and tie weights. missing: weights that the file lacks."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        if buffer.is_meta:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, torch.empty_like(buffer, device="cpu"))
    for name in model.all_tied_weights_keys:
        model.get_parameter(name)._is_hf_initialized = True
    model.initialize_weights()
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
