"""The memory that weights take, tensor by tensor, and whether it is free, before any weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvkeep.budget import size
from kvkeep.errors import ModelError, ModelTooLarge
from kvkeep.models.blocks import GROUP, KINDS, Kind
from kvkeep.models.formats import Format, chosen_format
from kvkeep.models.gguf.tensors import GgufTensor
from kvkeep.models.matrices import built, matrices, outer, packed_bits
from kvkeep.models.model_names import FORMATS
from kvkeep.native.room import address_space_left

QUANTISED = {4: "Q4_1", 8: "Q8_0"}
"""The kinds of blocks that kvkeep makes, by bits."""


@dataclass(frozen=True)
class WeightTensor:
    """One tensor in memory."""

    stored: str | None
    """The kind in a GGUF file (Q4_1); None otherwise."""
    bits: int
    """Bits of an element's code."""
    group: int | None
    """Elements that share a scale; None: there are no scales."""
    nbytes: int
    """Bytes, with scales."""


@dataclass(frozen=True)
class Weights:
    """The weights of a model."""

    requested: str
    """The format named by the user."""
    tensors: dict[str, WeightTensor]
    """Tensors by the model's names. A shared tensor is listed once."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


GgufTensors = Mapping[str, GgufTensor] | None


def weight_memory(config: Any, requested: str, made: Format, stored: GgufTensors = None) -> Weights:
    """Return the weights of the model of ``config`` in the format ``made``. stored: those of its GGUF file. Raises
    UnsupportedModelError if transformers cannot build the model."""
    if stored is not None and made.packed and made.bits is None:
        return Weights(requested, bits_of_file(stored))
    model = built(config, made.dtype)
    places, outside = (matrices(model), outer(model)) if made.packed else ({}, set())
    kinds = {name: tensor.kind for name, tensor in (stored or {}).items()}
    found = {}
    for name, weight in model.named_parameters():
        place, kind = name.removesuffix(".weight"), None
        if made.bits in QUANTISED and place in places and weight.shape[1] % GROUP == 0:
            kind = KINDS[QUANTISED[packed_bits(made.bits, place in outside)]]
        found[name] = _tensor(kinds.get(name), weight.numel(), 8 * weight.element_size(), kind)
    return Weights(requested, found)


def bits_of_file(stored: Mapping[str, GgufTensor]) -> dict[str, WeightTensor]:
    """Return the tensors of a GGUF file as loaded with the file's bits. Tensors that cannot keep them are bfloat16."""
    return {
        name: _tensor(tensor.kind, tensor.count, 16, KINDS[tensor.kind] if tensor.packs else None)
        for name, tensor in stored.items()
    }


def _tensor(stored: str | None, count: int, bits: int, kind: Kind | None) -> WeightTensor:
    """Return a tensor of ``count`` elements of ``bits`` bits, or in blocks of ``kind``."""
    if kind is None:
        return WeightTensor(stored, bits, None, count * bits // 8)
    return WeightTensor(stored, kind.bits, kind.group, count // kind.elements * kind.packed)


def check_memory(name: str, config: Any, needed: Weights, device: torch.device, stored: GgufTensors) -> None:
    """Raise ModelError, with a format that would fit, where there is less free memory than the weights need."""
    free = free_memory(torch.device("cpu"))
    if needed.nbytes <= free:
        return
    fitting = ""
    for requested in ("bfloat16", "int8", "int4"):
        if device.type == "cpu" or requested == "bfloat16":
            other = weight_memory(
                config, requested, chosen_format(requested, device, stored is not None, torch.bfloat16), stored
            ).nbytes
            if other <= free:
                fitting = f"with weights {requested} it would take {size(other)}."
                break
    raise ModelError(
        f"The model '{name}' takes {size(needed.nbytes)} with weights {needed.requested}, and {size(free)} of memory "
        f"are free; {fitting or 'it fits in none of ' + ', '.join(FORMATS[1:]) + '.'}"
    )


def too_large(name: str, place: str, error: BaseException) -> ModelTooLarge:
    """Return the error for memory that ran out while the model ``name`` was being loaded. place: its file, or the
    folder of its files."""
    path, taken = Path(place), ""
    with suppress(OSError, MemoryError):
        files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
        taken = f"its files have {size(sum(one.stat().st_size for one in files))}, and " if files else ""
    found = ModelTooLarge(
        f"There is not enough memory to load the model '{name}': {taken}{size(free_memory(torch.device('cpu')))} of "
        "memory are free; use a smaller model or smaller weights (--weights int4), or allow the process more memory."
    )
    found.__cause__ = error
    return found


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
