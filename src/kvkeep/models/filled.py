"""The model of a GGUF file: built without memory, then filled tensor by tensor from the file's table.

transformers' loader first compiles the renamings of every checkpoint format, which takes longer than reading a small
model. Here the tensors already have the model's names. The model computes tensors missing in the file (tables of
positions), and transformers ties weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.models.formats import Format
from kvkeep.models.gguf.tensors import GgufTensor
from kvkeep.models.matrices import without_memory
from kvkeep.models.packing import Packer, Packing
from kvkeep.models.weights import refuse_incomplete


@torch.no_grad()
def filled(name: str, kind: Any, config: Any, tensors: Mapping[str, GgufTensor], form: Format) -> Any:
    """Return the model ``name`` of class ``kind``, in eval mode. tensors: its weights by the model's names. A bias that
    the file lacks is zero.

    Raises ModelError for a missing weight, or a weight whose shape differs from the config.
    """
    with without_memory():
        model = kind._from_config(copy.deepcopy(config), dtype=form.dtype)
    packer = _packer(model, form)
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


def _packer(model: Any, form: Format) -> Packer | None:
    """Return the packer of ``model``; None if no matrix is packed."""
    if not form.packed:
        return None
    packer = Packer(Packing(form.bits), pre_quantized=False)
    packer._process_model_before_weight_loading(model)
    return packer


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
