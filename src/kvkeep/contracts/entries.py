"""Entries as parts exchange them, and the state of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.memory.rows import JoinedRows, Rows, concatenated
from kvkeep.step.plan import JoinedSpans


class EntryState(IntEnum):
    """Where one slot's key and value are, in one layer and KV head.

    The numbers are written into the pages of ``kvkeep inspect``; new ones go at the end.
    """

    DROPPED = 0  # attention never reads it again
    RESIDENT = 1  # attention reads it as it is
    CHECKPOINTED = 2  # not resident, and exact keys and values can be rebuilt
    QUANTISED = 3  # kept in fewer bits
    MERGED = 4  # averaged into another entry
    SKETCHED = 5  # added to a summary of many entries


class Piece(NamedTuple):
    """Some past entries, as attention reads them."""

    keys: Any
    """(lanes, 1, n, key_dim), or coded like the values (:class:`~kvkeep.step.plan.Coded`)."""
    values: Any
    """(lanes, 1, n, value_dim), or coded."""
    slots: Tensor | None = None
    """(lanes, n) int, -1 for none; None: the slots from ``first`` on, in every lane."""
    first: int = 0
    """The first slot, where there are no ``slots``."""
    gaps: bool = False
    """Some slots are -1."""
    extra: Tensor | None = None
    """(lanes, n) float32, the number of further tokens that an entry stands for; None: 0 for all."""
    lanes: Tensor | None = None
    """The lanes of the piece, (its lanes,) int64; None: all. A piece of some lanes has :attr:`slots`."""
    formed: bool = False
    """Keys and values are temporary."""

    def between(self, start: int, stop: int) -> Piece | None:
        """Return the entries of the slots from ``start`` to ``stop``, without a copy; None where there are none. Only
        for a piece without :attr:`slots` whose entries are not coded."""
        assert self.slots is None
        count = self.keys.shape[2]
        low, high = max(start - self.first, 0), min(stop - self.first, count)
        if low >= high:
            return None
        if isinstance(self.keys, JoinedSpans):
            keys: Any = self.keys.narrowed(low, high)
            values: Any = keys.values
        else:
            keys, values = self.keys[:, :, low:high], self.values[:, :, low:high]
        extra = None if self.extra is None else self.extra[:, low:high]
        return self._replace(keys=keys, values=values, first=self.first + low, extra=extra)


class EvictedEntries(NamedTuple):
    """Evicted entries, on their way to the store."""

    keys: Tensor
    """(lanes, n, key_dim)"""
    values: Tensor
    """(lanes, n, value_dim)"""
    slots: Tensor
    """(lanes, n) int, -1 for none."""
    scores: Tensor | None = None
    """(lanes, n) float32; None where the store needs no scores."""
    extra: Tensor | None = None
    """(lanes, n) float32, the number of further tokens that each entry stands for; None where the store does not merge.
    """
    newest: Tensor | None = None
    """(lanes, n) int, the last slot that each entry stands for; None where an entry stands for its slot only."""
    gaps: bool = True
    """Some slots may be -1."""

    def each(self, change: Callable[[Tensor], Tensor]) -> EvictedEntries:
        """Return the entries with every tensor changed."""
        changed = (None if part is None else change(part) for part in self[:-1])
        return EvictedEntries(*changed)._replace(gaps=self.gaps)  # type: ignore[arg-type]

    def at(self, index: Tensor) -> EvictedEntries:
        """Return copies of the entries at ``index`` (lanes, n)."""
        return self.each(lambda rows: gathered(rows, index))

    def joined(self, more: EvictedEntries) -> EvictedEntries:
        """Return these entries and then ``more``, with the optional parts that both have."""
        pairs = zip(self[:-1], more[:-1], strict=True)
        parts = (None if one is None or two is None else torch.cat([one, two], 1) for one, two in pairs)
        return EvictedEntries(*parts)._replace(gaps=self.gaps or more.gaps)  # type: ignore[arg-type]


def gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Return copies of the rows (lanes, entries, ...) at ``index`` (lanes, n)."""
    return rows.gather(1, index.view(*index.shape, *(1,) * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:]))


class Beginning(NamedTuple):
    """The first entries of a layer, for another layer to begin with."""

    blocks: list[list[Tensor]]
    """Keys, and values: the blocks in order. They never change."""
    rest: list[Tensor]
    """Keys and values after the blocks, as views; empty if there are none."""

    @classmethod
    def of(cls, blocks: Sequence[list[Tensor]], stores: Sequence[Rows | JoinedRows], length: int) -> Beginning:
        """Return the first ``length`` entries. blocks: those of them that never change; stores: all keys, and all
        values."""
        count = sum(block.shape[-2] for block in blocks[0])
        return cls([*blocks], [concatenated(rows, count, length) for rows in stores if count < length])
