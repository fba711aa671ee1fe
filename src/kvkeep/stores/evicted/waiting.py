"""Entries that wait for a full group: codes with half the bits of the model's numbers, within bounds set in advance.

A group is encoded when it is full, because keys of 32 entries share a scale for each channel. Until then up to 31
entries wait, and without codes they would take most of a small budget. So each channel has bounds before entries
arrive: the range of the entries present when the last group was made, widened by half of it to each side. Numbers
beyond the bounds are clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.stores.evicted.groups import GROUP

MARGIN = 0.5
"""The distance of the bounds beyond the range, as a share of the range."""


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


class Waiting:
    """Up to a group of entries of one layer; ``count`` is their number.

    width: bytes of a number of the model. Codes have half of them; scales and offsets are float16 for numbers of 16
    bits, float32 for wider ones. coded: False keeps entries as numbers of 16 bits.
    """

    def __init__(self, width: int, coded: bool = True) -> None:
        self.codes, self.scales = (torch.int8, torch.float16) if width <= 2 else (torch.int16, torch.float32)
        self.coded, self.count = coded, 0
        self.parts: list[Tensor] = []  # for keys and values: codes (lanes, GROUP, dim), scale, offset

    def begin(self, parts: Sequence[Tensor], there: Tensor | None) -> None:
        """Forget the waiting entries, and set bounds by keys and values (lanes, n, dim). there: (lanes, n) bool, which
        of them are entries; None: all."""
        self.parts, self.count = [part for numbers in parts for part in self._bounds(numbers, there)], 0

    def form(self, lanes: int, *dims: int) -> list[Tensor]:
        """Return empty parts for keys and values of widths ``dims``."""
        return [part for dim in dims for part in self._bounds(torch.zeros(lanes, GROUP, dim), None)]

    def _bounds(self, numbers: Tensor, there: Tensor | None) -> list[Tensor]:
        lanes, count, dim = numbers.shape
        if not self.coded:
            dtype = torch.float16 if numbers.dtype.itemsize > 2 else numbers.dtype
            one = numbers.new_ones(lanes, 1, dim, dtype=self.scales)
            return [numbers.new_zeros(lanes, GROUP, dim, dtype=dtype), one, torch.zeros_like(one)]
        low = high = numbers.float()
        if there is not None:
            low, high = (low.masked_fill(~there[..., None], end) for end in (float("inf"), float("-inf")))
        low, high = low.amin(1, keepdim=True), high.amax(1, keepdim=True)
        low, high = (end.masked_fill(low > high, 0.0) for end in (low, high))  # for lanes without entries
        reach = (high - low) * (0.5 + MARGIN)
        if count < GROUP:  # the bounds of a few entries are too narrow
            reach += torch.maximum(-low, high).amax(2, keepdim=True)
        scale = (reach / torch.iinfo(self.codes).max).to(self.scales).clamp_(min=torch.finfo(self.scales).tiny)
        return [numbers.new_zeros(lanes, GROUP, dim, dtype=self.codes), scale, ((low + high) / 2).to(self.scales)]

    def add(self, *parts: Tensor) -> None:
        """Add keys and values (lanes, n, dim), which must fit."""
        stop = self.count + parts[0].shape[1]
        for numbers, part in zip(parts, self.read(), strict=True):
            if self.coded:
                largest = torch.iinfo(self.codes).max
                numbers = ((numbers - part.offset.float()) / part.scale).round_().clamp_(-largest, largest)
            part.codes[:, self.count : stop] = numbers
        self.count = stop

    def read(self, count: int = GROUP) -> tuple[ByChannel, ByChannel]:
        """Return the first ``count`` keys and values."""
        keys, *of_keys, values, scale, offset = self.parts
        return ByChannel(keys[:, :count], *of_keys), ByChannel(values[:, :count], scale, offset)


def waiting_bytes(width: int, coded: bool = True) -> int:
    """Return the bytes of one channel of a waiting group, for a model whose numbers have ``width`` bytes."""
    size, scale = max(2, width) // 2, 2 if width <= 2 else 4
    return GROUP * (size if coded else 2) + 2 * scale
