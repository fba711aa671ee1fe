"""Matrices as rows of blocks, as GGUF files have them: a weight is ``scale * code + offset``.

A block is 32 (Q*_0, Q*_1) or 256 (Q*_K) elements of one row, with its scales. The layouts are ggml's, as
``gguf.quants`` of llama.cpp dequantises them; values are equal to its float32 values, bit by bit. What kvkeep quantises
itself becomes blocks as well, Q8_0 or Q4_1, and what it does not is of the kind BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep.errors import ModelError

Bytes = NDArray[np.uint8]
Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]
"""codes (blocks, elements), scales and offsets (blocks, elements / group)."""

HALF_MAXIMUM = 65504.0
"""The greatest number in float16, in which scales and offsets are kept."""
AT_ONCE = 1 << 22
"""Elements that are decoded or quantised at a time: the steps take several times their memory."""


@dataclass(frozen=True)
class Kind:
    """A kind of block."""

    bits: int
    """Of a code."""
    group: int | None
    """Elements that share a scale; None without."""
    elements: int
    """Of a block."""
    size: int
    """Bytes of a block in a file."""
    packed: int
    """Bytes of a block in the native library's panels."""
    read: Callable[[Bytes], Parts] | None
    """(blocks, size) to parts; None for bfloat16."""


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks of one of :data:`KINDS`."""

    kind: str
    rows: Tensor
    """(outputs, bytes of a row) uint8."""

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        about = KINDS[self.kind]
        return len(self.rows), self.rows.shape[1] // about.size * about.elements

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights, (outputs, inputs)."""
        outputs, inputs = self.shape
        made = torch.empty(outputs, inputs, dtype=dtype)
        step = max(1, AT_ONCE // inputs)
        for first in range(0, outputs, step):
            made[first : first + step] = _decoded(self.kind, self.rows[first : first + step]).to(dtype)
        return made

    def __getitem__(self, index: Tensor | slice) -> Blocks:
        """Return some rows, or all in another order."""
        return Blocks(self.kind, self.rows[index])


def quantised(weight: Tensor, bits: int) -> Blocks:
    """Return ``weight`` (outputs, inputs) in 4 bits (by least and greatest of a group of 32) or 8 (by the greatest), or
    in bfloat16 (16); in bfloat16 as well where its rows are no whole groups. Raises ModelError where a group has
    weights that are too large for a scale or an offset in float16, or infinite or NaN."""
    if bits == 16 or weight.shape[1] % GROUP:
        return Blocks("BF16", weight.detach().to(torch.bfloat16).contiguous().view(torch.uint8))
    step, encode = max(1, AT_ONCE // weight.shape[1]), _in_8_bits if bits == 8 else _in_4_bits
    parts = [encode(_finite(rows.detach().float(), bits).unflatten(1, (-1, GROUP))) for rows in weight.split(step)]
    return Blocks("Q8_0" if bits == 8 else "Q4_1", torch.cat(parts))


def _finite(rows: Tensor, bits: int) -> Tensor:
    """Return ``rows``, whose scales and offsets are finite in float16. The spread of a group is at most twice its
    greatest, and a scale the 15th part of it: of 4 bits the offset is what overflows first."""
    limit = HALF_MAXIMUM * 127 if bits == 8 else HALF_MAXIMUM
    greatest = rows.abs().amax()
    if not greatest.isfinite():
        raise ModelError("A matrix has a weight that is infinite or NaN: the file is damaged; fetch it again.")
    if greatest > limit:
        raise ModelError(
            f"A matrix has a weight of {greatest:.4g}, and weights of {bits} bits reach {limit:.4g}: load the model "
            "with --weights bfloat16."
        )
    return rows


def _in_8_bits(rows: Tensor) -> Tensor:
    scales = (rows.abs().amax(-1) / 127).half()
    codes = (rows / scales.float().clamp(min=1e-12)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scales[..., None].view(torch.uint8), codes.view(torch.uint8)], -1).flatten(1)


def _in_4_bits(rows: Tensor) -> Tensor:
    least, greatest = rows.aminmax(dim=-1)
    scales, offsets = ((greatest - least) / 15).half(), least.half()
    codes = ((rows - offsets.float()[..., None]) / scales.float().clamp(min=1e-12)[..., None]).round_().clamp_(0, 15)
    low, high = codes.to(torch.uint8).chunk(2, -1)
    halves = [part[..., None].view(torch.uint8) for part in (scales, offsets)]
    return torch.cat([*halves, low | high << 4], -1).flatten(1)


def _decoded(kind: str, rows: Tensor) -> Tensor:
    """Return rows of blocks in float32."""
    about = KINDS[kind]
    if about.read is None:
        return rows.contiguous().view(torch.bfloat16).float()
    codes, scales, offsets = about.read(rows.numpy().reshape(-1, about.size))
    groups = codes.shape[1] // scales.shape[1]
    made = codes.reshape(*scales.shape, groups).astype(np.float32) * scales.astype(np.float32)[..., None]
    if offsets is not None:
        made += offsets.astype(np.float32)[..., None]
    return torch.from_numpy(made.reshape(len(rows), -1))


def _half(data: Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(data).view(np.float16)


def _halves(data: Bytes, width: int) -> Bytes:
    """Low halves of ``width`` bytes, then their high halves, and so on: (blocks, n) to (blocks, 2n)."""
    runs = data.reshape(len(data), -1, 1, width)
    return (np.concatenate([runs & 15, runs >> 4], axis=2)).reshape(len(data), -1)


def _q4_0(data: Bytes) -> Parts:
    return _halves(data[:, 2:], 16).view(np.int8) - np.int8(8), _half(data[:, :2]), None


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
    "BF16": Kind(16, None, 2, 4, 4, None),
    "Q4_0": Kind(4, 32, 32, 18, 18, _q4_0),
    "Q4_1": Kind(4, 32, 32, 20, 20, _q4_1),
    "Q5_0": Kind(5, 32, 32, 22, 22, _q5_0),
    "Q5_1": Kind(5, 32, 32, 24, 24, _q5_1),
    "Q8_0": Kind(8, 32, 32, 34, 34, _q8_0),
    "Q4_K": Kind(4, 32, 256, 144, 148, _q4_k),
    "Q5_K": Kind(5, 32, 256, 176, 180, _q5_k),
    "Q6_K": Kind(6, 16, 256, 210, 210, _q6_k),
}
"""The kinds whose bits are kept; every other becomes bfloat16."""
GROUP = 32
"""Elements that share a scale, where kvkeep quantises itself."""
