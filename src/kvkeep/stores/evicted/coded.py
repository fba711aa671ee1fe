"""Entries in few bits: codes with a scale and an offset, and the two products that attention needs.

Keys are quantised per channel over groups of 32 entries, values per entry over groups of 32 channels (KIVI,
arXiv:2402.02750, section 3): x = offset + scale * code. For one query keys and values are multiplied without decoding:
scale and offset are folded into the query (keys) or into the weights (values).

Precision tiers normalise values by channel and have one scale for each entry (:class:`NormalisedValues`). Entries that
wait for a full group have a scale for each channel, set in advance (:class:`ByChannel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.stores.evicted.groups import GROUP

MARGIN = 0.5
"""The distance of bounds set in advance beyond the range of the present numbers, as a share of the range."""

FINE = 2.0**-8
"""The step of codes of 16 bits: these have 8 binary places more than codes of 8 bits, and are centred at 0."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 ``codes`` below 2**bits along the last axis: (..., n) to (..., n * bits / 8)."""
    parts = codes.chunk(8 // bits, -1)
    packed = parts[0].clone()
    for number, part in enumerate(parts[1:], start=1):
        packed |= part << (number * bits)
    return packed


def unpack(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Undo :func:`pack`, as numbers of ``dtype``; at 16 bits, int16 as steps of :data:`FINE`."""
    if bits == 16:
        return packed.to(dtype).mul_(FINE)
    if bits == 8:
        return packed.to(dtype)
    size, count = packed.shape[-1], 8 // bits
    codes = torch.empty(*packed.shape[:-1], size * count, dtype=dtype, device=packed.device)
    for number in range(count):
        part = packed >> (number * bits) if number else packed
        part = part & (2**bits - 1) if number < count - 1 else part
        codes[..., number * size : (number + 1) * size] = part
    return codes


def multiplied(left: Tensor, packed: Tensor, bits: int) -> Tensor:
    """Return ``left @ unpack(packed)`` without unpacking. A byte shifted by i codes is code i plus 2**bits times all
    codes above it. So the next product, times 2**bits, is subtracted from each product with a shifted byte."""
    if bits == 16:
        return (left @ packed.float()).mul_(FINE)
    products = [left @ (packed >> shift if shift else packed).float() for shift in range(0, 8, bits)]
    for number in range(len(products) - 1):
        products[number] = products[number].sub_(products[number + 1], alpha=2**bits)
    return torch.cat(products, -1) if len(products) > 1 else products[0]


def encode(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise along the last axis. Return packed codes, scale and offset (float16, with a last axis of 1). Codes of 16
    bits are int16, centred at 0."""
    rows = rows.float()
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    if bits == 16:  # float16 is coarser than a step, so the scale is rounded up to reach both ends
        offset = ((low + high) / 2).half()
        reach = torch.maximum(high - offset.float(), offset.float() - low) * (1 + 2**-10)
        scale = (reach / (128 - FINE)).clamp(min=1e-6).half()
        codes = ((rows - offset.float()) / scale.float() / FINE).round_().mul_(FINE).clamp_(FINE - 128, 128 - FINE)
        return (codes / FINE).to(torch.int16), scale, offset
    offset = low.half()
    scale = ((high - offset.float()) / (2**bits - 1)).clamp(min=1e-6).half()
    codes = ((rows - offset.float()) / scale.float()).round_().clamp_(0, 2**bits - 1)
    return pack(codes.to(torch.uint8), bits), scale, offset


@dataclass(frozen=True)
class Codes:
    """Numbers offset + scale * code, with codes packed along the last axis."""

    layout: ClassVar[str] = "grouped"

    codes: Tensor
    """uint8, (..., bytes), or int16 for codes of 16 bits."""
    scale: Tensor
    """(..., 1) float16"""
    offset: Tensor
    """(..., 1) float16"""
    bits: int
    """Bits of a code."""

    def _numbers(self) -> Tensor:
        return (unpack(self.codes, self.bits, torch.float32) * self.scale.float()).add_(self.offset.float())


@dataclass(frozen=True)
class CodedKeys(Codes):
    """Keys of some lanes: codes (lanes, groups, dim, GROUP packed), scale and offset (lanes, groups, dim, 1)."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape when decoded, (lanes, 1, entries, dim)."""
        lanes, groups, dim, _ = self.codes.shape
        return lanes, 1, groups * GROUP, dim

    def scores(self, query: Tensor) -> Tensor:
        """Return the products with ``query`` (lanes, rows, dim): (lanes, rows, entries) float32."""
        query = query.float()
        folded = query[:, None] * self.scale.float().transpose(2, 3)  # (lanes, groups, rows, dim)
        products = multiplied(folded, self.codes, self.bits)
        products += (self.offset[..., 0].float() @ query.transpose(1, 2))[..., None]
        return products.transpose(1, 2).flatten(2)

    def dense(self, dtype: torch.dtype) -> Tensor:
        # One group is a view of the transposed tensor, which the attention kernel would misread.
        return self._numbers().transpose(2, 3).flatten(1, 2).contiguous().to(dtype)


@dataclass(frozen=True)
class CodedValues(Codes):
    """Values of some lanes: codes (lanes, groups, parts, GROUP, width packed), scale and offset (lanes, groups, parts,
    GROUP, 1); ``parts`` of ``width`` channels each."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        lanes, groups, parts, *_ = self.codes.shape
        return lanes, 1, groups * GROUP, parts * self.width

    @property
    def width(self) -> int:
        """Channels of a part."""
        return self.codes.shape[-1] * (8 // min(8, self.bits))

    def mix(self, weights: Tensor) -> Tensor:
        grouped = weights.unflatten(2, (-1, GROUP)).transpose(1, 2)[:, :, None]  # (lanes, groups, 1, rows, GROUP)
        mixed = multiplied(grouped * self.scale.float().transpose(3, 4), self.codes, self.bits)
        mixed += grouped @ self.offset.float()
        return mixed.sum(1).transpose(1, 2).flatten(2)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self._numbers().transpose(2, 3).flatten(3).flatten(1, 2).to(dtype)


@dataclass(frozen=True)
class NormalisedValues(Codes):
    """Values of some lanes, normalised by channel: codes (lanes, entries, dim packed), scale and offset (lanes,
    entries, 1)."""

    mean: Tensor
    """The mean of each channel, (lanes, 1, dim)."""
    deviation: Tensor
    """The standard deviation of each channel, (lanes, 1, dim)."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.codes.shape[0], 1, self.codes.shape[1], self.mean.shape[2]

    @property
    def width(self) -> int:
        """Channels of a part: all."""
        return self.mean.shape[2]

    def mix(self, weights: Tensor) -> Tensor:
        mixed = multiplied(weights * self.scale.float().transpose(1, 2), self.codes, self.bits)
        mixed += weights @ self.offset.float()
        return mixed.mul_(self.deviation).add_(weights.sum(-1, keepdim=True) * self.mean)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self._numbers().mul_(self.deviation).add_(self.mean).to(dtype)


@dataclass(frozen=True)
class ByChannel:
    """Keys or values offset + scale * code, with a scale and an offset for each channel."""

    layout: ClassVar[str] = "by channel"

    codes: Tensor
    """(lanes, entries, dim)"""
    scale: Tensor
    """(lanes, 1, dim)"""
    offset: Tensor
    """(lanes, 1, dim)"""

    @classmethod
    def within(
        cls, numbers: Tensor, there: Tensor | None, entries: int, codes: torch.dtype, scales: torch.dtype
    ) -> ByChannel:
        """Return codes for ``entries`` to come, whose bounds are those of ``numbers`` (lanes, n, dim), widened by
        :data:`MARGIN`. there: (lanes, n) bool, which of the numbers are entries; None: all."""
        lanes, count, dim = numbers.shape
        low = high = numbers.float()
        if there is not None:
            low, high = (low.masked_fill(~there[..., None], end) for end in (float("inf"), float("-inf")))
        low, high = low.amin(1, keepdim=True), high.amax(1, keepdim=True)
        low, high = (end.masked_fill(low > high, 0.0) for end in (low, high))  # for lanes without entries
        reach = (high - low) * (0.5 + MARGIN)
        if count < GROUP:  # the bounds of a few entries are too narrow
            reach += torch.maximum(-low, high).amax(2, keepdim=True)
        scale = (reach / torch.iinfo(codes).max).to(scales).clamp_(min=torch.finfo(scales).tiny)
        return cls(numbers.new_zeros(lanes, entries, dim, dtype=codes), scale, ((low + high) / 2).to(scales))

    def encoded(self, numbers: Tensor) -> Tensor:
        """Return the codes of numbers (lanes, n, dim), clamped to the bounds."""
        largest = torch.iinfo(self.codes.dtype).max
        return ((numbers - self.offset.float()) / self.scale).round_().clamp_(-largest, largest)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(lanes, 1, entries, dim)."""
        lanes, entries, dim = self.codes.shape
        return lanes, 1, entries, dim

    def scores(self, query: Tensor) -> Tensor:
        """Return the products with ``query`` (lanes, rows, dim): (lanes, rows, entries) float32."""
        query = query.float()
        products = (query * self.scale) @ self.codes.float().transpose(1, 2)
        return products.add_(query @ self.offset.float().transpose(1, 2))

    def mix(self, weights: Tensor) -> Tensor:
        """Return the sums weighted by ``weights`` (lanes, rows, entries): (lanes, rows, dim) float32."""
        return (weights @ self.codes.float()).mul_(self.scale).add_(weights.sum(-1, keepdim=True) * self.offset)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.float() * self.scale.float()).add_(self.offset.float()).to(dtype)


def encode_keys(keys: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise one group of keys (lanes, GROUP, dim): (lanes, dim, ...) each."""
    return encode(keys.transpose(1, 2), bits)


def encode_values(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise one group of values (lanes, GROUP, dim): (lanes, parts, GROUP, ...) each."""
    return encode(values.unflatten(2, (-1, width(values.shape[2]))).transpose(1, 2), bits)


def width(dim: int) -> int:
    """Return the number of channels, out of ``dim``, that share an entry's scale."""
    return GROUP if dim % GROUP == 0 else dim


def group_bytes(key_dim: int, value_dim: int, bits: int) -> int:
    """Return the bytes of one group of GROUP entries of one lane, scales and offsets included."""
    keys = key_dim * (GROUP * bits // 8 + 4)
    values = GROUP * (value_dim * bits // 8 + 4 * (value_dim // width(value_dim)))
    return keys + values
