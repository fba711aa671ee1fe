"""Blocks of a GGUF file as codes: a weight of each is ``scale * code + offset``, so nothing is rounded.

A block is 32 (Q*_0, Q*_1) or 256 (Q*_K) elements of one row, with its scales. The layouts are ggml's, as
``gguf.quants`` of llama.cpp dequantises them; values are equal to its float32 values, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkeep.models.packed import Coded

Bytes = NDArray[np.uint8]
Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]
"""codes (blocks, elements), scales and offsets (blocks, elements / group)."""


@dataclass(frozen=True)
class Kind:
    """What becomes of a kind of block. scales: bytes of a group's scale and offset. elements and size: of a block, size
    in bytes. read: (blocks, size) to parts."""

    bits: int
    group: int
    scales: int
    elements: int
    size: int
    read: Callable[[Bytes], Parts]


def coded(kind: str, rows: Bytes) -> Coded:
    """Return rows of blocks (outputs, bytes of a row), of one of :data:`KINDS`, as codes."""
    found = KINDS[kind]
    codes, scales, offsets = found.read(rows.reshape(-1, found.size))
    taken = torch.from_numpy(np.ascontiguousarray(codes)).view(len(rows), -1)
    scale, offset = (
        None if part is None else torch.from_numpy(np.ascontiguousarray(part)).view(len(rows), -1)
        for part in (scales, offsets)
    )
    return Coded(taken, found.bits, scale, offset)


def _half(data: Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(data).view(np.float16)


def _halves(data: Bytes, width: int) -> Bytes:
    """Low halves of ``width`` bytes, then their high halves, and so on: (blocks, n) to (blocks, 2n)."""
    runs = data.reshape(len(data), -1, 1, width)
    return (np.concatenate([runs & 15, runs >> 4], axis=2)).reshape(len(data), -1)


def _q4_0(data: Bytes) -> Parts:
    scale = _half(data[:, :2])
    return _halves(data[:, 2:], 16), scale, scale * np.float16(-8)


def _q4_1(data: Bytes) -> Parts:
    return _halves(data[:, 4:], 16), _half(data[:, :2]), _half(data[:, 2:4])


def _fifth(data: Bytes) -> Bytes:
    """The fifth bits of 32 elements, at their place: (blocks, 4) to (blocks, 32)."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(data: Bytes) -> Parts:
    codes = (_halves(data[:, 6:], 16) | _fifth(data[:, 2:6])).view(np.int8) - np.int8(16)
    return codes, _half(data[:, :2]), None


def _q5_1(data: Bytes) -> Parts:
    codes = (_halves(data[:, 8:], 16) | _fifth(data[:, 4:8])).view(np.int8)
    return codes, _half(data[:, :2]), _half(data[:, 2:4])


def _q8_0(data: Bytes) -> Parts:
    return data[:, 2:].view(np.int8), _half(data[:, :2]), None


def _scales_of_k(data: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and offsets of the eight groups of a Q4_K or Q5_K block, each 6 bits of 12 bytes."""
    scale, least = (_half(data[:, at : at + 2]).astype(np.float32) for at in (0, 2))
    low, middle, both = (data[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (both & 15) | (low >> 2 & 48)], axis=1)
    least_of = np.concatenate([middle & 63, (both >> 4) | (middle >> 2 & 48)], axis=1)
    return scale * scales.astype(np.float32), -(least * least_of.astype(np.float32))


def _q4_k(data: Bytes) -> Parts:
    return _halves(data[:, 16:], 32), *_scales_of_k(data)


def _q5_k(data: Bytes) -> Parts:
    fifths = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None] & 1
    codes = _halves(data[:, 48:], 32) | fifths.reshape(len(data), -1) << 4
    return codes.view(np.int8), *_scales_of_k(data)


def _q6_k(data: Bytes) -> Parts:
    low, high = _halves(data[:, :128], 64), data[:, 128:192].reshape(-1, 2, 1, 32)
    upper = (high >> np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None] & 3).reshape(len(data), -1)
    codes = (low | upper << 4).view(np.int8) - np.int8(32)
    scales = _half(data[:, 208:]).astype(np.float32) * data[:, 192:208].view(np.int8).astype(np.float32)
    return codes, scales, None


KINDS = {
    "Q4_0": Kind(4, 32, 4, 32, 18, _q4_0),
    "Q4_1": Kind(4, 32, 4, 32, 20, _q4_1),
    "Q5_0": Kind(8, 32, 2, 32, 22, _q5_0),
    "Q5_1": Kind(8, 32, 4, 32, 24, _q5_1),
    "Q8_0": Kind(8, 32, 2, 32, 34, _q8_0),
    "Q4_K": Kind(4, 32, 8, 256, 144, _q4_k),
    "Q5_K": Kind(8, 32, 8, 256, 176, _q5_k),
    "Q6_K": Kind(8, 16, 4, 256, 210, _q6_k),
}
"""The kinds whose bits are kept, 5 and 6 bits in 8; every other becomes bfloat16."""
