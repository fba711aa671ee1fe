"""Formats of weights, and the memory that they take, tensor by tensor, before any weight is read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvkeep.budget import size
from kvkeep.errors import ModelError, UsageError
from kvkeep.models.experts import experts_of
from kvkeep.models.gguf.tensors import GgufTensor
from kvkeep.models.matrices import built, in_float32, matrices, outer, packed_bits
from kvkeep.models.model_names import FORMATS
from kvkeep.models.packed import GROUP, KINDS, Kind
from kvkeep.native.library import library
from kvkeep.native.room import address_space_left

BITS = {"int8": 8, "int4": 4}
QUANTISED = {4: "Q4_1", 8: "Q8_0"}
"""The kinds of blocks that kvkeep makes, by bits."""


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
            raise UsageError(f"Weights in {weights} run on the cpu only, not on {device}; use bfloat16 or auto there.")
        return Format(torch.bfloat16, True, BITS[weights])
    if weights == "auto":
        if not cpu:
            return Format(torch.bfloat16 if gguf else stated)
        if gguf:
            return Format(torch.bfloat16, True)
        weights = "bfloat16" if stated == torch.bfloat16 and library() is not None else "float32"
    packed = weights == "bfloat16" and cpu and library() is not None
    return Format(getattr(torch, weights), packed, 16 if packed else None)


GgufTensors = Mapping[str, GgufTensor] | None


def weight_bytes(config: Any, made: Format, stored: GgufTensors = None) -> int:
    """Return the bytes that the weights of the model of ``config`` take in the format ``made``. stored: those of its
    GGUF file. Raises UnsupportedModelError if transformers cannot build the model."""
    if stored is not None and made.packed and made.bits is None:
        return sum(
            _bytes(torch.Size(part.shape).numel(), 16, KINDS[part.kind] if one.packs else None)
            for one in stored.values()
            for part in one.parts
        )
    model = built(config, made.dtype)
    places, outside = (matrices(model), outer(model)) if made.packed else ({}, set())
    experts = experts_of(model) if made.packed else {}
    wide = re.compile("|".join(in_float32(model)))
    total = 0
    for name, weight in model.named_parameters():
        place, kind = name.removesuffix(".weight"), None
        inputs, (of, _, last) = weight.shape[-1], name.rpartition(".")
        packs = place in places
        if of in experts and last in (form := experts[of].form).matrices:
            packs, inputs = True, form.shape(weight.shape)[-1]
        if made.bits in QUANTISED and packs and inputs % GROUP == 0:
            kind = KINDS[QUANTISED[packed_bits(made.bits, place in outside)]]
        stays = made.packed and not packs and wide.search(name) is not None
        total += _bytes(weight.numel(), 32 if stays else 8 * weight.element_size(), kind)
    return total


def _bytes(count: int, bits: int, kind: Kind | None) -> int:
    """Return the bytes of ``count`` elements of ``bits`` bits, or in blocks of ``kind``."""
    return count * bits // 8 if kind is None else count // kind.elements * kind.packed


def check_memory(
    name: str, config: Any, requested: str, made: Format, device: torch.device, stored: GgufTensors
) -> None:
    """Raise ModelError, with a format that would fit, where there is less free memory than the weights need."""
    needed, free = weight_bytes(config, made, stored), free_memory(torch.device("cpu"))
    if needed <= free:
        return
    fitting = f"it fits in none of {', '.join(FORMATS[1:])}."
    for other in ("bfloat16", "int8", "int4") if device.type == "cpu" else ("bfloat16",):
        smaller = chosen_format(other, device, stored is not None, torch.bfloat16)
        if (taken := weight_bytes(config, smaller, stored)) <= free:
            fitting = f"with weights {other} it would take {size(taken)}."
            break
    raise ModelError(
        f"The model '{name}' takes {size(needed)} with weights {requested}, and {size(free)} of memory are free; "
        f"{fitting}"
    )


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device; on the CPU, with the memory that the system can reclaim, and within the limit
    of the process (``ulimit -v``)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = address_space_left()
    return _free_of_system() if left is None else min(_free_of_system(), left)


def _free_of_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * 10**9
