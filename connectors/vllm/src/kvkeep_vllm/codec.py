"""Codecs of blocks: unchanged bytes, or codes of 8 or 4 bits (:mod:`kvkeep.stores.evicted.coded`, as in ``quantize``).

vLLM's CPU kernels store keys in an order that depends on the processor (``isa``), while codes need rows of entries. The
connector finds the order by storing keys and values that contain their positions through the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.errors import StoreError, UsageError, unknown
from kvkeep.stores.evicted.coded import CodedKeys, CodedValues, encode_keys, encode_values
from kvkeep.stores.evicted.groups import GROUP
from kvkeep_vllm.tensors import BlockTensors

CODECS = {"exact": 0, "int8": 8, "int4": 4}
"""Bits per number, by the codec's name; 0 for unchanged bytes."""
_DIGIT = 128
"""Base of encoded positions. Smaller integers are exact in every dtype of a cache."""
_PARTS = tuple(f"{half} {part}" for half in ("keys", "values") for part in ("codes", "scales", "offsets"))
"""Names of the tensors of a block of codes."""

Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes keys and values (entries, heads, dim) to a block's halves (heads, entries, dim), in the kernel's order."""


class BlockCodec(Protocol):
    """The stored form of a block."""

    def encode(self, raw: Tensor) -> dict[str, Tensor]:
        """Return the stored form of a block (bytes,) uint8."""

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the block. Raises StoreError for tensors of another form."""


class ExactCodec:
    """Stores the bytes of a block unchanged. nbytes: bytes of a block."""

    def __init__(self, nbytes: int) -> None:
        self._forms = {"block": (torch.Size([nbytes]), torch.uint8)}

    def encode(self, raw: Tensor) -> dict[str, Tensor]:
        """Return the block."""
        return {"block": raw}

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the block. Raises StoreError for tensors of another form."""
        return _checked(stored, self._forms)[0]


class QuantizedCodec:
    """Stores codes of ``bits`` bits. Layers have one shape, (blocks, heads, entries, 2 * dim): keys fill the first half
    of a head's block and values the second, each in the kernel's order. Keys have a scale for each channel and 32
    entries, values for each entry and 32 channels. Lossy.

    Raises UsageError for layers of another shape.
    """

    def __init__(self, bits: int, tensors: BlockTensors, store: Store) -> None:
        first = tensors.layers[0]
        same = all(one.shape[1:] == first.shape[1:] and one.dtype == first.dtype for one in tensors.layers)
        if not same or first.ndim != 4 or not first.is_floating_point() or first.dtype.itemsize < 2:
            raise UsageError("Codes need layers of one shape with keys and values of 16 or 32 bits; use codec 'exact'.")
        self.bits, self.dtype, self.layers = bits, first.dtype, len(tensors.layers)
        _, self.heads, self.entries, both = first.shape
        self.dim = both // 2
        if self.entries % GROUP or self.dim % (8 // bits):
            raise UsageError(f"Blocks of {self.entries} entries of {self.dim} numbers cannot be {bits}-bit codes.")
        self.places = places(self.heads, self.entries, self.dim, self.dtype, store)
        zeros = torch.zeros(self.layers * self.heads, self.entries, self.dim)
        self._forms = {name: (part.shape, part.dtype) for name, part in self._parts(zeros, zeros).items()}

    def encode(self, raw: Tensor) -> dict[str, Tensor]:
        """Return codes, scales and offsets of the keys and of the values."""
        halves = raw.view(self.dtype).view(-1, 2, self.entries * self.dim)
        keys, values = (halves[:, number, order].view(-1, self.entries, self.dim) for number, order in self._orders)
        return self._parts(keys, values)

    def decode(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the decoded block. Raises StoreError for tensors of another form."""
        parts = _checked(stored, self._forms)
        keys = CodedKeys(parts[0], parts[1], parts[2], self.bits)
        values = CodedValues(parts[3], parts[4], parts[5], self.bits)
        halves = torch.empty(len(parts[0]), 2, self.entries * self.dim, dtype=self.dtype)
        for (number, order), one in zip(self._orders, (keys.dense(self.dtype), values.dense(self.dtype)), strict=True):
            halves[:, number, order] = one.flatten(1)
        return halves.view(-1).view(torch.uint8)

    @property
    def _orders(self) -> Sequence[tuple[int, Tensor]]:
        return tuple(enumerate(self.places))

    def _parts(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return codes, scales and offsets, (lanes, groups, ...) each, of keys and values (lanes, entries, dim)."""
        lanes = len(keys)
        keys, values = (one.reshape(-1, GROUP, self.dim) for one in (keys, values))
        parts = [*encode_keys(keys, self.bits), *encode_values(values, self.bits)]
        return {name: part.unflatten(0, (lanes, -1)) for name, part in zip(_PARTS, parts, strict=True)}


def places(heads: int, entries: int, dim: int, dtype: torch.dtype, store: Store) -> tuple[Tensor, Tensor]:
    """Return the position to which ``store`` writes each number of a head's keys and values, by entry and channel: two
    tensors (entries * dim,) int64. Raises UsageError unless ``store`` permutes numbers in the same order for all
    heads."""
    count = entries * dim
    found = torch.zeros(2, heads, count, dtype=torch.int64)
    numbers = torch.arange(count)
    digit = 1
    while digit < count:
        digits = (numbers // digit % _DIGIT).to(dtype).view(entries, 1, dim).expand(-1, heads, -1).contiguous()
        made = torch.full((2, heads, entries, dim), -1.0, dtype=dtype)
        store(digits, digits.clone(), made[0], made[1])
        found += made.flatten(2).long() * digit
        digit *= _DIGIT
    if not (found == found[:, :1]).all() or not (found[:, 0].sort().values == numbers).all():
        raise UsageError("vLLM's order of entries on this processor is unknown; use codec 'exact'.")
    keys, values = found[:, 0].argsort()
    return keys, values


def bits_of(name: str) -> int:
    """Return the bits of the codec called ``name``. Raises UsageError for an unknown one."""
    if name not in CODECS:
        raise unknown("codec", name, CODECS)
    return CODECS[name]


def _checked(stored: Mapping[str, Tensor], forms: Mapping[str, tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    """Return the tensors in the order of ``forms``, which has their shapes and dtypes."""
    if {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} != forms:
        raise StoreError("A stored block has other shapes than this engine's.")
    return [stored[name] for name in forms]
