"""What weights take in memory, tensor by tensor, and whether there is room for them, before any is read."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvkeep.errors import ModelError
from kvkeep.models.blocks import KINDS
from kvkeep.models.formats import FORMATS, Format, settled
from kvkeep.models.gguf import Table
from kvkeep.models.matrices import built, matrices, outer, packed_bits
from kvkeep.models.packed import GROUP, fits
from kvkeep.units import size

SCALES = {4: 4, 8: 2}
"""Bytes of scale and offset of a group, where kvkeep quantises itself."""


@dataclass(frozen=True)
class Tensor:
    """One tensor in memory. stored: its kind in a GGUF file (Q4_1), None elsewhere. bits: of an element's code. group:
    elements that share a scale, None without. nbytes: with scales."""

    stored: str | None
    bits: int
    group: int | None
    nbytes: int


@dataclass(frozen=True)
class Weights:
    """The weights of a model. asked: the format asked for. tensors: by the model's names, a shared one once."""

    asked: str
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def weights(config: Any, asked: str, made: Format, table: Table | None = None) -> Weights:
    """Return what the weights of the model of ``config`` become. table: of its GGUF file. Raises UnsupportedModelError
    where transformers cannot build it."""
    model = built(config, made.dtype)
    places, outside = (matrices(model), outer(model)) if made.packed else ({}, set())
    own = {} if table is None or not made.packed or made.bits is not None else own_bits(table)
    kinds = {} if table is None else {entry.to: entry.kind for entry in table.entries}
    found = {}
    for name, weight in model.named_parameters():
        bits, group, scales = 8 * weight.element_size(), None, 0
        whole = name.removesuffix(".weight") in places and fits(weight.shape[0], weight.shape[1], GROUP)
        if whole and made.bits in SCALES:
            bits = packed_bits(made.bits, name.removesuffix(".weight") in outside)
            group, scales = GROUP, SCALES[bits]
        found[name] = own.get(name) or _tensor(kinds.get(name), weight.numel(), bits, group, scales)
    return Weights(asked, found)


def own_bits(table: Table) -> dict[str, Tensor]:
    """Return what becomes of a GGUF file's tensors that keep their bits, and the others in bfloat16."""
    made = {}
    for entry in table.entries:
        kind = KINDS.get(entry.kind) if entry.packs else None
        bits, group, scales = (16, None, 0) if kind is None else (kind.bits, kind.group, kind.scales)
        made[entry.to] = _tensor(entry.kind, math.prod(entry.shape), bits, group, scales)
    return made


def _tensor(stored: str | None, count: int, bits: int, group: int | None, scales: int) -> Tensor:
    return Tensor(stored, bits, group, count * bits // 8 + (count // group * scales if group else 0))


def check_room(name: str, config: Any, needed: Weights, device: torch.device, table: Table | None) -> None:
    """Raise ModelError, with a format that would fit, where there is less free memory than the weights need."""
    free = free_memory(torch.device("cpu"))
    if needed.nbytes <= free:
        return
    fitting = ""
    for asked in ("bfloat16", "int8", "int4"):
        if device.type == "cpu" or asked == "bfloat16":
            other = weights(config, asked, settled(asked, device, table is not None, torch.bfloat16), table).nbytes
            if other <= free:
                fitting = f"with weights {asked} it would take {size(other)}."
                break
    raise ModelError(
        f"The model '{name}' takes {size(needed.nbytes)} with weights {needed.asked}, and {size(free)} of memory are "
        f"free; {fitting or 'it fits in none of ' + ', '.join(FORMATS[1:]) + '.'}"
    )


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, on the CPU with those that the system would give back."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * 10**9
