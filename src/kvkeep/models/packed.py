"""Small weights: linear layers and embeddings whose weights are codes of 4 or 8 bits, or bfloat16.

A weight is ``scale * code + offset``, with a scale and an offset for each group of a row's elements. That is what the
blocks of a GGUF file say, so a file's own codes are kept as they are and nothing is rounded twice. Activations are
bfloat16, sums float32. The kernels' bits do not depend on the number of rows (kernels/cpu.cpp); without kernels the
weight is written out in bfloat16 and multiplied by torch.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.kernels.build import address, library

GROUP = 32
"""Elements that share a scale, where kvkeep quantises itself."""
PANEL = 32
"""Outputs that lie together; as kernels/cpu.cpp has it."""


class WeightStruct(ctypes.Structure):
    """``Weights`` of kernels/cpu.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "bits", "group", "half")),
    ]


@dataclass(frozen=True)
class Coded:
    """A matrix as codes. codes: (outputs, inputs), uint8 of 0..15 for 4 ``bits``, int8 for 8, bfloat16 for 16. scales,
    offsets: (outputs, inputs / group), float16 or float32 alike; None for 16 bits, and offsets where there are none."""

    codes: Tensor
    bits: int
    scales: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def group(self) -> int:
        """Elements of a row that share a scale."""
        return self.codes.shape[1] if self.scales is None else self.codes.shape[1] // self.scales.shape[1]

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights, (outputs, inputs)."""
        if self.scales is None:
            return self.codes.to(dtype)
        rows = self.codes.float().unflatten(1, (-1, self.group)) * self.scales.float()[..., None]
        if self.offsets is not None:
            rows += self.offsets.float()[..., None]
        return rows.flatten(1).to(dtype)

    def rows(self, index: Tensor) -> Coded:
        """Return some rows, or all in another order."""
        scales, offsets = (None if part is None else part[index] for part in (self.scales, self.offsets))
        return Coded(self.codes[index], self.bits, scales, offsets)


def joined(parts: list[Coded]) -> Coded:
    """Return the rows of ``parts``, which are coded alike, one after another."""

    def together(pieces: list[Tensor | None]) -> Tensor | None:
        return None if pieces[0] is None else torch.cat([piece for piece in pieces if piece is not None])

    if len(parts) == 1:
        return parts[0]
    codes = torch.cat([part.codes for part in parts])
    return Coded(
        codes, parts[0].bits, together([part.scales for part in parts]), together([part.offsets for part in parts])
    )


def fits(outputs: int, inputs: int, group: int) -> bool:
    """Return whether the kernels multiply such a matrix."""
    return inputs % group == 0 and group % 16 == 0 and inputs % 16 == 0


def quantised(weight: Tensor, bits: int, group: int = GROUP) -> Coded:
    """Return ``weight`` (outputs, inputs) in 4 bits (by least and greatest of a group) or 8 (by the greatest), or in
    bfloat16 (16); in bfloat16 as well where its rows are no whole groups."""
    if bits == 16 or not fits(weight.shape[0], weight.shape[1], group):
        return Coded(weight.to(torch.bfloat16), 16)
    rows = weight.float().unflatten(1, (-1, group))
    if bits == 8:
        scales = (rows.abs().amax(-1) / 127).half()
        codes = (rows / scales.float().clamp(min=1e-12)[..., None]).round_().clamp_(-127, 127)
        return Coded(codes.flatten(1).to(torch.int8), 8, scales)
    least, greatest = rows.aminmax(dim=-1)
    scales, offsets = ((greatest - least) / 15).half(), least.half()
    codes = ((rows - offsets.float()[..., None]) / scales.float().clamp(min=1e-12)[..., None]).round_().clamp_(0, 15)
    return Coded(codes.flatten(1).to(torch.uint8), 4, scales, offsets)


class Packed(nn.Module):
    """A matrix in panels of 32 outputs, as the kernels read it; buffers only, so that it has no gradient."""

    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None

    def __init__(self, matrix: Coded) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.codes.shape
        self.bits, self.group = matrix.bits, matrix.group
        self.register_buffer("codes", _packed(matrix.codes, matrix.bits))
        self.register_buffer("scales", _by_panel(matrix.scales))
        self.register_buffer("offsets", _by_panel(matrix.offsets))

    @functools.cached_property
    def struct(self) -> WeightStruct:
        """The matrix as the kernels take it; its tensors must outlive it."""
        half = self.scales is not None and self.scales.dtype == torch.float16
        pointers = [address(part) for part in (self.codes, self.scales, self.offsets)]
        return WeightStruct(*pointers, self.in_features, self.out_features, self.bits, self.group, int(half))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move to another device; codes and scales keep their dtypes."""
        self.__dict__.pop("struct", None)  # its pointers
        device = fn(torch.empty(0, dtype=torch.bfloat16, device=self.codes.device)).device
        return super()._apply(lambda tensor: tensor.to(device), recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied or saved: without pointers."""
        return {name: value for name, value in self.__dict__.items() if name != "struct"}

    def coded(self) -> Coded:
        """Return the codes in the order of rows and columns again."""
        codes = _unpacked(self.codes, self.bits, self.in_features)[: self.out_features]
        scales, offsets = (
            None if part is None else part.transpose(1, 2).flatten(0, 1)[: self.out_features]
            for part in (self.scales, self.offsets)
        )
        return Coded(codes, self.bits, scales, offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return sum(buffer.nbytes for buffer in self.buffers())


class PackedLinear(Packed):
    """``nn.Linear`` with small weights. bias: bfloat16."""

    bias: Tensor | None

    def __init__(self, matrix: Coded, bias: Tensor | None = None) -> None:
        super().__init__(matrix)
        self.register_buffer("bias", None if bias is None else bias.to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., inputs) times the weights: (..., outputs)."""
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(x, self, self.bias)
        return multiplied(self, x, self.bias)

    def extra_repr(self) -> str:
        """Return what a printed model says."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, group={self.group}"

    @property
    def weight(self) -> Tensor:
        """The weights written out in bfloat16: transformers looks at the dtype and device of some."""
        return self.coded().dense(torch.bfloat16)


class PackedEmbedding(nn.Module):
    """``nn.Embedding`` with small weights, of which looked-up rows are written out. May share its matrix with the
    language-model head."""

    def __init__(self, matrix: Packed, scale: float = 1.0, padding_idx: int | None = None) -> None:
        super().__init__()
        self.matrix, self.scale, self.padding_idx = matrix, scale, padding_idx
        self.num_embeddings, self.embedding_dim = matrix.out_features, matrix.in_features

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids`` (...): (..., width) bfloat16."""
        rows = _rows(self.matrix, ids.reshape(-1)).to(torch.bfloat16).view(*ids.shape, -1)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=torch.bfloat16)


def multiplies(matrix: Packed) -> bool:
    """Return whether the kernels multiply with a matrix, where there are any."""
    return fits(matrix.out_features, matrix.in_features, min(matrix.group, matrix.in_features))


def multiplied(matrix: Packed, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` (..., inputs) times the matrix, transposed: (..., outputs) in the dtype of ``x``."""
    kernels = library() if x.device.type == "cpu" else None
    if kernels is None or not multiplies(matrix):
        weight = matrix.coded().dense(x.dtype)
        return nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    rows = x.to(torch.bfloat16).reshape(-1, matrix.in_features).contiguous()
    out = torch.empty(len(rows), matrix.out_features, dtype=torch.bfloat16)
    kernels.kk_product(
        ctypes.addressof(matrix.struct),
        rows.data_ptr(),
        len(rows),
        address(bias),
        out.data_ptr(),
        matrix.out_features,
    )
    return out.view(*x.shape[:-1], -1).to(x.dtype)


class _Product(torch.autograd.Function):
    """:func:`multiplied`, with a gradient for ``x`` and none for the weights, which are written out for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Packed, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return multiplied(matrix, x, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.matrix.coded().dense(gradient.dtype), None, None


def _by_panel(part: Tensor | None) -> Tensor | None:
    """(outputs, groups) to (panels, groups, 32), zeros behind the last."""
    if part is None:
        return None
    padded = nn.functional.pad(part, (0, 0, 0, -len(part) % PANEL))
    return padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def _packed(codes: Tensor, bits: int) -> Tensor:
    """(outputs, inputs) to panels: (panels, inputs / 8, 32) int32 of 8 codes for 4 bits, else
    (.., inputs / 2, 32, 2)."""
    codes = nn.functional.pad(codes, (0, 0, 0, -len(codes) % PANEL)).unflatten(0, (-1, PANEL))
    if bits != 4:
        return codes.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
    packed = torch.zeros(codes.shape[0], codes.shape[2] // 8, PANEL, dtype=torch.int32)
    eights = codes.unflatten(2, (-1, 4, 2))  # (panels, 32, inputs / 8, pair, which)
    for pair in range(4):
        for which in range(2):
            packed |= eights[..., pair, which].transpose(1, 2).int() << (4 * pair + 16 * which)
    return packed


def _unpacked(packed: Tensor, bits: int, inputs: int) -> Tensor:
    if bits != 4:
        return packed.transpose(1, 2).reshape(-1, inputs)
    shifts = torch.tensor([[4 * pair + 16 * which for which in range(2)] for pair in range(4)], dtype=torch.int32)
    codes = (packed[..., None, None] >> shifts.to(packed.device)) & 15  # (panels, inputs / 8, 32, 4, 2)
    return codes.transpose(1, 2).reshape(-1, inputs).to(torch.uint8)


def _rows(matrix: Packed, index: Tensor) -> Tensor:
    """Return some rows of the matrix in float32, (n, inputs), without writing out the others."""
    panel, place = index // PANEL, index % PANEL
    columns = slice(None)
    codes = matrix.codes[panel, columns, place]  # (n, inputs / 8) or (n, inputs / 2, 2)
    if matrix.bits == 4:
        shifts = torch.tensor([4 * (k // 2) + 16 * (k % 2) for k in range(8)], dtype=torch.int32, device=codes.device)
        codes = (codes[..., None] >> shifts) & 15
    rows = codes.flatten(1).float()
    if matrix.scales is None:
        return rows
    scales = matrix.scales[panel, columns, place].float()
    rows = rows.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    if matrix.offsets is not None:
        rows += matrix.offsets[panel, columns, place].float()[..., None]
    return rows.flatten(1)
