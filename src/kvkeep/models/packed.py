"""Packed weights: matrices in blocks of a GGUF file or in bfloat16, and the modules that multiply them.

A weight in a block is ``scale * code + offset``, or ``scale`` times one of 16 values (IQ4_NL, IQ4_XS, MXFP4), or
``scale`` times one of 4 or 8 numbers of an entry of a codebook (IQ1_*, IQ2_*, IQ3_*). A block has 32 (Q*_0, Q*_1,
IQ4_NL, MXFP4) or 256 (Q*_K, TQ*, other IQ*) elements of one row and their scales; the layouts are ggml's.
kvkeep quantises weights to blocks of Q8_0 or Q4_1, and the package gguf decodes the kinds that occur only in GGUF
files. Unquantised weights have the kind BF16, or F16 or F32 if a file has them so.

If the native library runs, a matrix is stored in the library's panels (native/panels.h), and the library multiplies it.
Inputs are rounded to 8 bits by groups of 32, and an output's bits do not depend on the number of rows. Without the
library, a matrix is stored as rows of blocks, decoded to bfloat16 and multiplied by torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvkeep.errors import ModelError
from kvkeep.geometry import ModelGeometry
from kvkeep.native.library import kernels, library
from kvkeep.native.structures import KIND_NUMBERS, NOT_FINITE, KvMatrix, address_of, array
from kvkeep.plugins import optional

HALF_MAXIMUM = 65504.0
"""Largest float16 number. Scales and offsets are float16."""
DECODED_ELEMENTS = 1 << 22
"""Number of elements that are decoded or quantised at a time. The operations need several times their memory."""
TRIAL_ROWS = (2, 3, 7, 13)
"""Rows of a trial. Products of several rows work in other ways than those of one: in tiles, or with decoded weights."""


@dataclass(frozen=True)
class Kind:
    """A kind of block."""

    elements: int
    """Number of elements of a block."""
    size: int
    """Bytes of a block in a file."""
    packed: int
    """Bytes of a block in the native library's panels."""


KINDS = {
    "BF16": Kind(2, 4, 4),
    "F16": Kind(2, 4, 4),
    "F32": Kind(1, 4, 4),
    "Q4_0": Kind(32, 18, 18),
    "Q4_1": Kind(32, 20, 20),
    "Q5_0": Kind(32, 22, 22),
    "Q5_1": Kind(32, 24, 24),
    "Q8_0": Kind(32, 34, 34),
    "Q4_K": Kind(256, 144, 148),
    "Q5_K": Kind(256, 176, 180),
    "Q6_K": Kind(256, 210, 210),
    "IQ4_NL": Kind(32, 18, 18),
    "IQ4_XS": Kind(256, 136, 138),
    "MXFP4": Kind(32, 17, 17),
    "Q2_K": Kind(256, 84, 84),
    "Q3_K": Kind(256, 110, 110),
    "IQ1_S": Kind(256, 50, 50),
    "IQ1_M": Kind(256, 56, 56),
    "IQ2_XXS": Kind(256, 66, 66),
    "IQ2_XS": Kind(256, 74, 74),
    "IQ2_S": Kind(256, 82, 82),
    "IQ3_XXS": Kind(256, 98, 98),
    "IQ3_S": Kind(256, 110, 110),
    "TQ1_0": Kind(256, 54, 54),
    "TQ2_0": Kind(256, 66, 66),
}
"""The kinds that stay as they are in memory. Other kinds are converted to bfloat16."""
GROUP = 32
"""Number of elements that share a scale in kvkeep's quantisation."""


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks of one of :data:`KINDS`."""

    kind: str
    rows: Tensor
    """Rows of blocks, (outputs, bytes of a row) uint8."""
    columns: Tensor | None = None
    """(inputs) int64: ``columns[i]`` is the column of :attr:`rows` with column i of the matrix; None: i itself."""

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
        return made if self.columns is None else made[:, self.columns]

    def __getitem__(self, index: Tensor | slice) -> Blocks:
        """Return the rows at ``index``."""
        return Blocks(self.kind, self.rows[index], self.columns)


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


class WithPointers:
    """An object with structs for the kernels, or tables of their addresses, in cached properties."""

    pointers: ClassVar[tuple[str, ...]] = ("struct",)
    """The names of these properties."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying or saving, without pointers."""
        return {name: value for name, value in self.__dict__.items() if name not in self.pointers}


class Packed(WithPointers, nn.Module):
    """A matrix of packed weights; buffers only, so that it has no gradient."""

    data: Tensor
    """Panels of the native library, uint8; without it rows of blocks, (outputs, bytes of a row)."""
    columns: Tensor | None
    """As in :class:`Blocks`."""

    def __init__(self, matrix: Blocks) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.kind = matrix.kind
        self.native = library() is not None and self.in_features % KINDS[self.kind].elements == 0
        self.register_buffer("data", _packed(matrix) if self.native else matrix.rows.clone())  # the file may change
        self.register_buffer("columns", matrix.columns)

    @property
    def plain(self) -> bool:
        """Whether the library multiplies with it, and its inputs stay in their order."""
        return self.native and self.columns is None

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

    def blocks(self) -> Blocks:
        """Return the matrix as rows of blocks, on the CPU."""
        if not self.native:
            return Blocks(self.kind, self.data.cpu(), None if self.columns is None else self.columns.cpu())
        about = KINDS[self.kind]
        rows = torch.empty(self.out_features, self.in_features // about.elements * about.size, dtype=torch.uint8)
        kernels().kvkeep_unpack(address_of(self.struct), rows, rows.shape[1])
        return Blocks(self.kind, rows, self.columns)

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
    """Return ``x`` (..., inputs) times the matrix, transposed: (..., outputs) in the dtype of ``x``. The library
    rounds ``x`` to bfloat16, unless the matrix is in float32."""
    if not matrix.native:
        return nn.functional.linear(x, matrix.dense(x.dtype), None if bias is None else bias.to(x.dtype))
    dtype = torch.float32 if matrix.kind == "F32" and x.dtype == torch.float32 else torch.bfloat16
    rows = x.to(dtype).reshape(-1, matrix.in_features).contiguous()
    if matrix.columns is not None:
        rows = torch.empty_like(rows).index_copy_(1, matrix.columns, rows)
    out = torch.empty(len(rows), matrix.out_features, dtype=dtype)
    bias = None if bias is None else bias.to(dtype)
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


@torch.no_grad()
def row_independent(model: Any) -> bool:
    """Return whether a token's logits have the same bits in any batch as in a single row.

    If so, and if the kernel computes attention, a verifying pass, a chunk of a prompt and a batch have the bits of
    single tokens. Each model is tried once, on tokens without a past, and only if kernels compute all its products:
    torch chooses its products by shape, and a trial cannot cover all shapes. The result is never true for float32 on a
    CPU.
    """
    known: bool | None = getattr(model, "_kvkeep_row_independent", None)
    if known is None and not _by_kernels(model):
        known = model._kvkeep_row_independent = False
    if known is None:
        count = max(TRIAL_ROWS)
        vocabulary = ModelGeometry.from_config(model.config).vocab_size
        ids = torch.randint(0, vocabulary, (count, 1), generator=torch.Generator().manual_seed(3)).to(model.device)
        single = torch.cat([model(row[None], use_cache=False).logits for row in ids])
        known = all(torch.equal(model(ids[:rows], use_cache=False).logits, single[:rows]) for rows in TRIAL_ROWS)
        model._kvkeep_row_independent = known
    return known


def _by_kernels(model: Any) -> bool:
    """Return whether kernels multiply all matrices, as they do packed ones. Other parameters are only added or looked
    up, or are those of a recurrent module's convolution, which depends on other tokens by its state alone."""
    if library() is None or model.device.type != "cpu":
        return False
    for module in model.modules():
        if isinstance(module, Packed):
            if not module.native:
                return False
        elif not isinstance(module, nn.Embedding | nn.Conv1d) and any(
            one.squeeze().ndim > 1 and not getattr(one, "by_library", False) for one in module.parameters(recurse=False)
        ):
            return False
    return True
