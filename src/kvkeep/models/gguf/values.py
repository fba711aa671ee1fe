"""The values of a tensor in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep.errors import ModelError
from kvkeep.models.gguf.header import FileTensor
from kvkeep.plugins import optional

DECODED_ELEMENTS = 1 << 24
"""Elements that are read and decoded at a time."""


def values(tensor: FileTensor) -> Tensor:
    """Return the values of ``tensor`` in its shape, float32. Raises ModelError for a file that is cut short."""
    gguf = optional("gguf", "gguf")
    kind = gguf.GGMLQuantizationType[tensor.kind]
    made = np.empty(tensor.shape, dtype=np.float32)
    flat, first = made.reshape(-1, tensor.shape[-1]), 0
    for rows in _rows(tensor):
        flat[first : first + len(rows)] = gguf.quants.dequantize(rows, kind)
        first += len(rows)
    return torch.from_numpy(made)


def stored_bytes(tensor: FileTensor, offset: int, count: int) -> NDArray[np.uint8]:
    """Return ``count`` bytes of ``tensor`` from ``offset`` on. Raises ModelError for a file that is cut short."""
    data = np.fromfile(tensor.file, np.uint8, count, offset=tensor.offset + offset)
    if len(data) != count:
        raise ModelError(f"'{tensor.file}' is cut short: it ends within {tensor.name}; fetch it again.")
    return data


def _rows(tensor: FileTensor) -> Iterator[NDArray[Any]]:
    """Yield the bytes of all rows, some rows at a time: (rows, bytes of a row)."""
    count = math.prod(tensor.shape[:-1])
    width, step = tensor.size // count, max(1, DECODED_ELEMENTS // tensor.shape[-1])
    for first in range(0, count, step):
        taken = min(step, count - first)
        yield stored_bytes(tensor, first * width, taken * width).reshape(taken, width)
