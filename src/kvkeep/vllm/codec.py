"""What a block is kept as: its bytes, or codes of 8 or 4 bits (:mod:`kvkeep.stores.coded`, as of ``quantize``).

vLLM's kernels for CPUs keep keys in an order that depends on the processor (``isa``). Codes need entries: so the order
is found by asking the kernel, which is given keys and values that are their own places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvkeep.errors import StoreError, UsageError, unknown
from kvkeep.stores.coded import CodedKeys, CodedValues, encode_keys, encode_values
from kvkeep.stores.groups import GROUP
from kvkeep.vllm.pages import Pages

CODECS = {"exact": 0, "int8": 8, "int4": 4}
"""Bits of a number by the codec's name; 0: as it is."""
_DIGIT = 128
"""Whole numbers below it are exact in every type of a cache."""

Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Writes keys and values (entries, heads, dim) to a block's halves (heads, entries, dim), in the kernel's order."""


class Codec(Protocol):
    """How a block is kept, in ``nbytes``."""

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""

    def encode(self, raw: np.ndarray) -> Sequence[Any]:
        """Return a block (bytes,) uint8 as objects with bytes."""

    def decode(self, payload: memoryview) -> np.ndarray:
        """Return the block. Raises StoreError for a payload of another length."""


@dataclass(frozen=True)
class Exact:
    """The bytes as they are, ``nbytes`` of them."""

    nbytes: int

    def encode(self, raw: np.ndarray) -> Sequence[Any]:
        """Return them."""
        return [raw]

    def decode(self, payload: memoryview) -> np.ndarray:
        """Return them."""
        return np.frombuffer(_of_length(payload, self.nbytes), np.uint8)


class Coded:
    """Codes of ``bits`` bits of a cache of layers of one shape, (blocks, heads, entries, 2 * dim): keys fill the first
    half of a head's block, values the second, each in its order. Keys have a scale for each channel and 32 entries,
    values for each entry and 32 channels.

    Raises UsageError for layers of another form.
    """

    def __init__(self, bits: int, pages: Pages, store: Store) -> None:
        first = pages.tensors[0]
        alike = all(one.shape[1:] == first.shape[1:] and one.dtype == first.dtype for one in pages.tensors)
        if not alike or first.ndim != 4 or not first.is_floating_point() or first.dtype.itemsize < 2:
            raise UsageError(
                "Codes are of layers with keys and values of one shape and 16 or 32 bits; use codec 'exact'."
            )
        self.bits, self.dtype, self.layers = bits, first.dtype, len(pages.tensors)
        _, self.heads, self.entries, both = first.shape
        self.dim = both // 2
        if self.entries % GROUP or self.dim % (8 // bits):
            raise UsageError(f"Blocks of {self.entries} entries of {self.dim} numbers cannot be {bits}-bit codes.")
        self.places = places(self.heads, self.entries, self.dim, self.dtype, store)
        zeros = torch.zeros(self.layers * self.heads, self.entries, self.dim)
        self._forms = [(part.shape, part.dtype) for part in self._parts(zeros, zeros)]
        self.nbytes = sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in self._forms)

    def encode(self, raw: np.ndarray) -> Sequence[Any]:
        """Return keys' codes, scales and offsets, and then those of values."""
        halves = torch.from_numpy(raw).view(self.dtype).view(-1, 2, self.entries * self.dim)
        keys, values = (halves[:, number, order].view(-1, self.entries, self.dim) for number, order in self._orders)
        return [part.contiguous().view(torch.uint8).numpy() for part in self._parts(keys, values)]

    def decode(self, payload: memoryview) -> np.ndarray:
        """Return the block that is nearest to the codes."""
        raw = torch.from_numpy(np.frombuffer(_of_length(payload, self.nbytes), np.uint8).copy())
        sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in self._forms]
        parts = [
            part.view(dtype).view(shape) for part, (shape, dtype) in zip(raw.split(sizes), self._forms, strict=True)
        ]
        keys, values = CodedKeys(*parts[:3], self.bits), CodedValues(*parts[3:], self.bits)  # type: ignore[call-arg]
        halves = torch.empty(len(parts[0]), 2, self.entries * self.dim, dtype=self.dtype)
        for (number, order), one in zip(self._orders, (keys.dense(self.dtype), values.dense(self.dtype)), strict=True):
            halves[:, number, order] = one.flatten(1)
        return halves.view(-1).view(torch.uint8).numpy()

    @property
    def _orders(self) -> Sequence[tuple[int, Tensor]]:
        return tuple(enumerate(self.places))

    def _parts(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Return the parts of codes, (lanes, groups, ...) each, of keys and values (lanes, entries, dim)."""
        lanes = len(keys)
        keys, values = (one.reshape(-1, GROUP, self.dim) for one in (keys, values))
        parts = [*encode_keys(keys, self.bits), *encode_values(values, self.bits)]
        return [part.unflatten(0, (lanes, -1)) for part in parts]


def places(heads: int, entries: int, dim: int, dtype: torch.dtype, store: Store) -> tuple[Tensor, Tensor]:
    """Return where ``store`` puts the numbers of a head's keys, and of its values: (entries * dim,) int64 each, by
    entry and channel. Raises UsageError where it is no order of places, or not one for all heads."""
    count = entries * dim
    found = torch.zeros(2, heads, count, dtype=torch.int64)
    own = torch.arange(count)
    digit = 1
    while digit < count:
        numbers = (own // digit % _DIGIT).to(dtype).view(entries, 1, dim).expand(-1, heads, -1).contiguous()
        made = torch.full((2, heads, entries, dim), -1.0, dtype=dtype)
        store(numbers, numbers.clone(), made[0], made[1])
        found += made.flatten(2).long() * digit
        digit *= _DIGIT
    if not (found == found[:, :1]).all() or not (found[:, 0].sort().values == own).all():
        raise UsageError(
            "The order in which vLLM keeps entries on this processor is not understood; use codec 'exact'."
        )
    keys, values = found[:, 0].argsort()
    return keys, values


def bits_of(name: str) -> int:
    """Return the bits of the codec called ``name``. Raises UsageError for an unknown one."""
    if name not in CODECS:
        raise unknown("codec", name, CODECS)
    return CODECS[name]


def _of_length(payload: memoryview, length: int) -> memoryview:
    if len(payload) != length:
        raise StoreError(f"A block of {len(payload)} bytes was found where one of {length} belongs.")
    return payload
