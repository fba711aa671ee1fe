"""Matrices as rows of blocks, as in GGUF files: a weight is ``scale * code + offset``.

A block has 32 (Q*_0, Q*_1) or 256 (Q*_K) elements of one row and their scales. The layouts are ggml's. The package gguf
decodes the kinds that occur only in GGUF files. kvkeep quantises weights to blocks of Q8_0 or Q4_1. Unquantised weights
have the kind BF16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.errors import ModelError
from kvkeep.plugins import optional

HALF_MAXIMUM = 65504.0
"""Largest float16 number. Scales and offsets are float16."""
DECODED_ELEMENTS = 1 << 22
"""Number of elements that are decoded or quantised at a time. The operations need several times their memory."""


@dataclass(frozen=True)
class Kind:
    """A kind of block."""

    bits: int
    """Bits of a code."""
    group: int | None
    """Number of elements that share a scale; None without scales."""
    elements: int
    """Number of elements of a block."""
    size: int
    """Bytes of a block in a file."""
    packed: int
    """Bytes of a block in the native library's panels."""


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks of one of :data:`KINDS`."""

    kind: str
    rows: Tensor
    """Rows of blocks, (outputs, bytes of a row) uint8."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix, (outputs, inputs)."""
        about = KINDS[self.kind]
        return len(self.rows), self.rows.shape[1] // about.size * about.elements

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights, (outputs, inputs)."""
        outputs, inputs = self.shape
        made = torch.empty(outputs, inputs, dtype=dtype)
        step = max(1, DECODED_ELEMENTS // inputs)
        for first in range(0, outputs, step):
            made[first : first + step] = _decoded(self.kind, self.rows[first : first + step]).to(dtype)
        return made

    def __getitem__(self, index: Tensor | slice) -> Blocks:
        """Return the rows at ``index``."""
        return Blocks(self.kind, self.rows[index])


def quantised(weight: Tensor, bits: int) -> Blocks:
    """Return ``weight`` (outputs, inputs) in ``bits`` bits: 4 (by minimum and maximum of a group of 32), 8 (by the
    maximum of the group), or 16 (bfloat16). The result is also in bfloat16 if groups do not divide a row. Raises
    ModelError for a group with infinite or NaN weights, or with weights too large for a float16 scale or offset."""
    if bits == 16 or weight.shape[1] % GROUP:
        return Blocks("BF16", weight.detach().to(torch.bfloat16).contiguous().view(torch.uint8))
    step, encode = max(1, DECODED_ELEMENTS // weight.shape[1]), _in_8_bits if bits == 8 else _in_4_bits
    parts = [encode(_finite(rows.detach().float(), bits).unflatten(1, (-1, GROUP))) for rows in weight.split(step)]
    return Blocks("Q8_0" if bits == 8 else "Q4_1", torch.cat(parts))


def _finite(rows: Tensor, bits: int) -> Tensor:
    """Return ``rows`` after a check that their scales and offsets are finite in float16. The range of a group is at
    most twice its maximum, and a 4-bit scale is a 15th of the range. With 4 bits, the offset therefore overflows first.
    """
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
    if kind == "BF16":
        return rows.contiguous().view(torch.bfloat16).float()
    if kind not in ("Q8_0", "Q4_1"):
        gguf = optional("gguf", "gguf")
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))
    blocks = rows.reshape(-1, KINDS[kind].size)
    if kind == "Q8_0":
        codes = blocks[:, 2:].view(torch.int8).float()
        return (codes * blocks[:, :2].contiguous().view(torch.float16).float()).view(len(rows), -1)
    scales, offsets = blocks[:, :4].contiguous().view(torch.float16).float().split(1, 1)
    codes = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).float()
    return (codes * scales + offsets).view(len(rows), -1)


KINDS = {
    "BF16": Kind(16, None, 2, 4, 4),
    "Q4_0": Kind(4, 32, 32, 18, 18),
    "Q4_1": Kind(4, 32, 32, 20, 20),
    "Q5_0": Kind(5, 32, 32, 22, 22),
    "Q5_1": Kind(5, 32, 32, 24, 24),
    "Q8_0": Kind(8, 32, 32, 34, 34),
    "Q4_K": Kind(4, 32, 256, 144, 148),
    "Q5_K": Kind(5, 32, 256, 176, 180),
    "Q6_K": Kind(6, 16, 256, 210, 210),
}
"""The kinds that stay quantised in memory. Other kinds are converted to bfloat16."""
GROUP = 32
"""Number of elements that share a scale in kvkeep's quantisation."""
