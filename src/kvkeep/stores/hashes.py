"""Pseudo-random numbers that are the same on every device, in every batch, and after a rollback."""

from __future__ import annotations

from torch import Tensor


def scattered(numbers: Tensor) -> Tensor:
    """Return 31 hashed bits for each of ``numbers`` (int64), int64, by integer arithmetic modulo 2**64."""
    for multiplier in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        numbers = (numbers ^ (numbers >> 29)) * multiplier
    return (numbers >> 33) & 0x7FFFFFFF
