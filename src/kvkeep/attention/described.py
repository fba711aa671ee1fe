"""Entries as the CPU kernel reads them: pieces wherever they lie, described once however often they are attended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.native.library import KvPiece, piece_table

TILE = 32
"""Entries of a tile, as native/attention.h has it."""


class Described:
    """Entries where they lie, as the kernel reads them: described once, however often they are attended.

    pieces: of keys and values, (lanes, n, dim) tensors, or codes or estimates of as many (``layout`` of
    :class:`~kvkeep.attention.attend.Coded`). rows: the kernel's table of them. entries: how many there are.
    """

    def __init__(self, pieces: Sequence[tuple[Any, Any]]) -> None:
        self.rows = piece_table(len(pieces))
        self.value_dim: int = pieces[0][1].shape[-1]
        self.grouped = grouped(pieces[0][0])
        self._held = [part for row, pair in zip(self.rows, pieces, strict=True) for part in _describe(row, *pair)]
        self.entries = sum(row.count for row in self.rows)

    def end(self, entries: int) -> Described:
        """Let it end after so many entries, which reach into its last piece."""
        self.rows[len(self.rows) - 1].count += entries - self.entries
        self.entries = entries
        return self


def grouped(keys: Any) -> bool:
    """Return whether these are codes in groups of a tile, which come first because tiles begin with them."""
    return getattr(keys, "layout", "") == "grouped"


class Stretch(Described):
    """Entries in pages of a checkpoint as one segment, however many pages.

    pages: of keys and values, (lanes, rows, dim) each. Its shape is that of its keys; :attr:`values` is its other side.
    """

    layout: ClassVar[str] = ""

    def __init__(self, pages: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(pages)
        self.pages = pages
        self._lanes, _, self._dim = pages[0][0].shape
        self.values = _Values(self)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(lanes, 1, entries, dim)."""
        return self._lanes, 1, self.entries, self._dim

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the keys as one tensor, (lanes, entries, dim)."""
        return torch.cat([keys for keys, _ in self.pages], 1)[:, : self.entries].to(dtype)


class _Values:
    """The values of a :class:`Stretch`."""

    layout: ClassVar[str] = ""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return *self._stretch.shape[:3], self._stretch.value_dim

    def dense(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([values for _, values in self._stretch.pages], 1)[:, : self._stretch.entries].to(dtype)


class Turning:
    """Entries in two rings, (lanes, rows, dim) that slot s lies in at s mod ``capacity``: described once a ring."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        self.keys, self.values, self.capacity = keys, values, capacity
        self._table = Described([(keys, values)] * 2)
        self._bytes = keys.stride(1) * keys.itemsize, values.stride(1) * values.itemsize

    def between(self, first: int, stop: int) -> Described:
        """Return the entries of slots ``first`` .. ``stop`` in order, no more than there is room for."""
        table, low = self._table, first % self.capacity
        ahead, behind = table.rows
        ahead.keys, ahead.values = behind.keys + low * self._bytes[0], behind.values + low * self._bytes[1]
        table.entries = stop - first
        ahead.count = min(table.entries, self.capacity - low)
        behind.count = table.entries - ahead.count
        return table


def _describe(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    """Fill a row of the kernel's table; return the tensors that it points to, some of them copies."""
    if isinstance(keys, Tensor):
        return _entries(row, keys, values)
    return {"grouped": _codes, "by channel": _by_channel, "sketched": _estimates}[keys.layout](row, keys, values)


def _entries(row: KvPiece, keys: Tensor, values: Tensor) -> list[Tensor]:
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    row.keys, row.values, (row.lanes, row.count, _) = keys.data_ptr(), values.data_ptr(), keys.shape
    row.key_lane, row.key_row, _ = keys.stride()
    row.value_lane, row.value_row, _ = values.stride()
    return [keys, values]


def _codes(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    held: list[Tensor] = []
    lanes, _, row.count, _ = keys.shape
    row.lanes, row.key_bits, row.value_bits, row.width = lanes, keys.bits, values.bits, values.width
    groups = row.count // TILE
    for name, part in (("key", keys), ("value", values)):
        codes, scale, offset = (
            one if one[0].is_contiguous() else one.contiguous() for one in (part.codes, part.scale, part.offset)
        )
        held += [codes, scale, offset]
        setattr(row, f"{name}s", codes.data_ptr())
        setattr(row, f"{name}_lane", codes.stride(0) * codes.itemsize)
        setattr(row, f"{name}_row", codes[0].numel() // groups * codes.itemsize)
        setattr(row, f"{name}_scale", scale.data_ptr())
        setattr(row, f"{name}_offset", offset.data_ptr())
        setattr(row, f"{name}_scale_lane", scale.stride(0))
    if (mean := getattr(values, "mean", None)) is not None:
        mean, deviation = (part.expand(lanes, -1, -1).contiguous() for part in (mean, values.deviation))
        held += [mean, deviation]
        row.mean, row.deviation = mean.data_ptr(), deviation.data_ptr()
    return held


def _by_channel(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    row.lanes, _, row.count, _ = keys.shape
    row.key_bits = row.value_bits = 8
    for name, part in (("key", keys), ("value", values)):
        setattr(row, f"{name}s", part.codes.data_ptr())
        setattr(row, f"{name}_lane", part.codes.stride(0))
        setattr(row, f"{name}_row", part.codes.stride(1))
        setattr(row, f"{name}_scale", part.scale.data_ptr())
        setattr(row, f"{name}_offset", part.offset.data_ptr())
        setattr(row, f"{name}_scale_lane", part.scale.stride(0))
    return [tensor for part in (keys, values) for tensor in (part.codes, part.scale, part.offset)]


def _estimates(row: KvPiece, keys: Any, values: Any) -> list[Tensor]:
    row.sums, row.lanes, row.count = keys.at.shape
    row.median = keys.by == "median"
    places = keys.at.int().contiguous()
    held = [places]
    row.places = places.data_ptr()
    for name, part in (("key", keys), ("value", values)):
        cells = part.cells.contiguous()
        held.append(cells)
        setattr(row, f"{name}s", cells.data_ptr())
        setattr(row, f"{name}_lane", cells.stride(0))
    if keys.mean is not None:
        means = [part.mean.float().contiguous() for part in (keys, values)]
        held += means
        row.key_mean, row.mean = (mean.data_ptr() for mean in means)
    return held
