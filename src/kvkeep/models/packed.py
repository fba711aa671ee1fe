"""Packed weights: linear layers and embeddings whose weights are blocks of a GGUF file, or bfloat16.

If the native library runs, a matrix is stored in the library's panels (native/panels.h), and the library multiplies it.
Inputs are rounded to 8 bits by groups of 32, and an output's bits do not depend on the number of rows. Without the
library, a matrix is stored as rows of blocks, decoded to bfloat16 and multiplied by torch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.errors import ModelError
from kvkeep.models.blocks import KINDS, Blocks
from kvkeep.native.library import kernels, library
from kvkeep.native.structures import KIND_NUMBERS, NOT_FINITE, KvMatrix, address_of, array


class Packed(nn.Module):
    """A matrix of packed weights; buffers only, so that it has no gradient."""

    data: Tensor
    """Panels of the native library, uint8; without it rows of blocks, (outputs, bytes of a row)."""

    def __init__(self, matrix: Blocks) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.kind = matrix.kind
        self.native = library() is not None and self.in_features % KINDS[self.kind].elements == 0
        self.register_buffer("data", _packed(matrix) if self.native else matrix.rows.contiguous())

    @functools.cached_property
    def struct(self) -> KvMatrix:
        """The matrix as a struct for the kernels. Its tensors must outlive it."""
        return KvMatrix(array(self.data), self.in_features, self.out_features, KIND_NUMBERS[self.kind])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move to another device. Codes keep their dtype; panels become rows if the library does not run there."""
        self.__dict__.pop("struct", None)  # its pointers become invalid
        device = fn(torch.empty(0, dtype=torch.bfloat16, device=self.data.device)).device
        if self.native and device.type != "cpu":
            self.data, self.native = self.blocks().rows, False
        return super()._apply(lambda tensor: tensor.to(device), recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying or saving, without pointers."""
        return {name: value for name, value in self.__dict__.items() if name != "struct"}

    def blocks(self) -> Blocks:
        """Return the matrix as rows of blocks, on the CPU."""
        if not self.native:
            return Blocks(self.kind, self.data.cpu())
        about = KINDS[self.kind]
        rows = torch.empty(self.out_features, self.in_features // about.elements * about.size, dtype=torch.uint8)
        kernels().kvkeep_unpack(address_of(self.struct), rows, rows.shape[1])
        return Blocks(self.kind, rows)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights, (outputs, inputs)."""
        return self.blocks().dense(dtype).to(self.data.device)

    def rows(self, index: Tensor) -> Tensor:
        """Return the rows at ``index`` (n,) in float32, (n, inputs). Other rows are not decoded."""
        if not self.native:
            return Blocks(self.kind, self.data[index].cpu()).dense().to(self.data.device)
        index = index.to(torch.int64).contiguous()
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.out_features:
            raise IndexError(f"Row indices are from 0 to {self.out_features - 1}.")
        made = torch.empty(len(index), self.in_features)
        kernels().kvkeep_rows(address_of(self.struct), index, made)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.data.nbytes


class PackedLinear(Packed):
    """``nn.Linear`` with packed weights."""

    bias: Tensor | None
    """(outputs,) bfloat16"""

    def __init__(self, matrix: Blocks, bias: Tensor | None = None) -> None:
        super().__init__(matrix)
        self.register_buffer("bias", None if bias is None else bias.to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` (..., inputs) times the weights: (..., outputs)."""
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(x, self, self.bias)
        return multiplied(self, x, self.bias)

    def extra_repr(self) -> str:
        """Return the text for a printed model."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"

    @property
    def weight(self) -> Tensor:
        """The weights decoded to bfloat16: transformers reads the dtype and device of some weights."""
        return self.dense(torch.bfloat16)


class PackedEmbedding(nn.Module):
    """``nn.Embedding`` with packed weights. Only looked-up rows are decoded. It may share its matrix with the
    language-model head."""

    def __init__(self, matrix: Packed, scale: float = 1.0, padding_idx: int | None = None) -> None:
        super().__init__()
        self.matrix, self.scale, self.padding_idx = matrix, scale, padding_idx
        self.num_embeddings, self.embedding_dim = matrix.out_features, matrix.in_features

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids`` (...): (..., width) bfloat16."""
        rows = self.matrix.rows(ids.reshape(-1)).to(torch.bfloat16).view(*ids.shape, self.embedding_dim)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=torch.bfloat16)


def multiplied(matrix: Packed, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` (..., inputs) times the matrix, transposed: (..., outputs) in the dtype of ``x``."""
    if not matrix.native:
        return nn.functional.linear(x, matrix.dense(x.dtype), None if bias is None else bias.to(x.dtype))
    rows = x.to(torch.bfloat16).reshape(-1, matrix.in_features).contiguous()
    out = torch.empty(len(rows), matrix.out_features, dtype=torch.bfloat16)
    kernels().kvkeep_product(address_of(matrix.struct), rows, bias, out, matrix.out_features)
    return out.view(*x.shape[:-1], matrix.out_features).to(x.dtype)


class _Product(torch.autograd.Function):
    """:func:`multiplied`, with a gradient only for ``x``. The backward pass decodes the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Packed, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return multiplied(matrix, x, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.matrix.dense(gradient.dtype), None, None


def _packed(matrix: Blocks) -> Tensor:
    """Return the panels of a matrix. Rows may lie apart, in their final order."""
    outputs, inputs = matrix.shape
    number, rows = KIND_NUMBERS[matrix.kind], matrix.rows.contiguous()
    panels = torch.empty(kernels().kvkeep_packed_bytes(number, inputs, outputs), dtype=torch.uint8)
    if kernels().kvkeep_pack(number, inputs, outputs, rows, rows.shape[1], panels) == NOT_FINITE:
        raise ModelError(
            f"A matrix of {outputs} x {inputs} weights ({matrix.kind}) has a scale that is infinite or NaN: the "
            "file is damaged; fetch it again."
        )
    return panels
