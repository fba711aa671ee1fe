"""Sizes of one layer's tensors, and checks of restored ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class ShapeError(Exception):
    """A restored tensor or number is invalid; the message is a part of a sentence."""


@dataclass(frozen=True)
class Extent:
    """The sizes of one layer."""

    lanes: int
    """The number of KV heads of all rows."""
    slots: int
    key_dim: int
    """Elements of one key."""
    value_dim: int
    """Elements of one value."""

    def entries(self, keys: Tensor | None, values: Tensor | None, lanes: int | None = None) -> int:
        """Return the number n of entries of keys and values (lanes, n, dim), which must share a floating dtype. lanes:
        the number of lanes; None: all."""
        count = keys.shape[1] if keys is not None and keys.ndim == 3 else 0
        lanes = self.lanes if lanes is None else lanes
        fits("keys", keys, (lanes, count, self.key_dim))
        fits("values", values, (lanes, count, self.value_dim), None if keys is None else keys.dtype)
        return count

    def numbered(self, what: str, slots: Tensor | None, sizes: Sequence[int | None]) -> None:
        """Check slot numbers, int32, -1 for none."""
        within(what, fits(what, slots, sizes, torch.int32), -1, self.slots)


def fits(what: str, tensor: Tensor | None, sizes: Sequence[int | None], dtype: torch.dtype | None = None) -> Tensor:
    """Return ``tensor`` if it has these ``sizes`` (None: any) and ``dtype`` (None: any floating one). Raises
    ShapeError."""
    if tensor is None:
        raise ShapeError(f"'{what}' is missing")
    right = len(sizes) == tensor.ndim and all(
        size in (None, length) for size, length in zip(sizes, tensor.shape, strict=False)
    )
    if not right or (tensor.dtype != dtype if dtype is not None else not tensor.is_floating_point()):
        raise ShapeError(f"'{what}' is {_form(tensor)}")
    return tensor


def fits_each(what: str, tensors: Sequence[Tensor], like: Sequence[Tensor], sizes: Sequence[int | None]) -> None:
    """Raise ShapeError unless ``tensors`` match ``like``, except for their first axes, which are ``sizes``."""
    if len(tensors) != len(like):
        raise ShapeError(f"there are {len(tensors)} parts of '{what}'")
    for tensor, one in zip(tensors, like, strict=True):
        fits(what, tensor, (*sizes, *one.shape[len(sizes) :]), one.dtype)


def within(what: str, numbers: Tensor | int, low: int, high: int) -> None:
    """Raise ShapeError unless all ``numbers`` are from ``low`` to below ``high``."""
    if isinstance(numbers, int):
        lowest = highest = numbers
    elif numbers.numel():
        lowest, highest = int(numbers.min()), int(numbers.max())
    else:
        return
    if not low <= lowest <= highest < high:
        raise ShapeError(f"'{what}' has numbers from {lowest} to {highest}, of {low} to {high - 1}")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
