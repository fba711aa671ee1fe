"""Arithmetic with the same bits on every processor, for what selectors and fates compute.

Each operation here rounds every element once, and the order of sums is fixed. The sums of torch add in an order that
depends on the width of the processor's vectors, and torch.lerp and torch.addcmul round once or twice, whichever the
processor does faster.
"""

from __future__ import annotations

import torch
from torch import Tensor


def summed(numbers: Tensor, axis: int) -> Tensor:
    """Return the sum along ``axis``, which is kept with length 1: the upper half is added to the lower until one is
    left."""
    count = numbers.shape[axis]
    if not count:
        return numbers.sum(axis, keepdim=True)
    while count > 1:
        half = count // 2
        lower = numbers.narrow(axis, 0, half) + numbers.narrow(axis, half, half)
        rest = numbers.narrow(axis, 2 * half, count - 2 * half)
        numbers = torch.cat([lower, rest], axis) if count % 2 else lower
        count -= half
    return numbers


def interpolated(first: Tensor, second: Tensor, share: Tensor | float) -> Tensor:
    """Return ``first`` + ``share`` * (``second`` - ``first``): exactly ``second`` for a share of 1."""
    difference = second - first
    if isinstance(share, Tensor):
        return torch.where(share < 0.5, first + difference * share, second - difference * (1 - share))
    return first + difference * share if share < 0.5 else second - difference * (1 - share)


def scattered(numbers: Tensor) -> Tensor:
    """Return 31 hashed bits for each of ``numbers`` (int64), int64, by integer arithmetic modulo 2**64."""
    for multiplier in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        numbers = (numbers ^ (numbers >> 29)) * multiplier
    return (numbers >> 33) & 0x7FFFFFFF
