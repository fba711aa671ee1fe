"""Entries as parts hand them to each other, and what became of each."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor


class EntryState(IntEnum):
    """Where one slot's key and value are, in one layer and KV head.

    The numbers are written into the pages of ``kvkeep inspect``; new ones go at the end.
    """

    DROPPED = 0  # gone: attention will never see it again
    RESIDENT = 1  # attention reads it as it is
    CHECKPOINTED = 2  # not resident, and exact keys and values can be rebuilt
    QUANTISED = 3  # kept in fewer bits
    MERGED = 4  # averaged into another entry
    SKETCHED = 5  # only its part in a summary of many entries is left


class Piece(NamedTuple):
    """Some past entries, as attention reads them.

    keys, values: (lanes, 1, n, dim), or both coded (:mod:`kvkeep.attention.attend`). slots: (lanes, n) int, -1
    for none; None: the slots from ``first`` on, in every lane. holes: whether some slots are -1. extra: (lanes, n)
    float32, for how many tokens besides its own an entry stands. lanes: which lanes the piece is about, (its lanes,)
    int64; None: all. shared: one copy for all rows of the batch, (kv_heads, 1, n, dim). formed: keys and values were
    made for the moment.
    """

    keys: Any
    values: Any
    slots: Tensor | None = None
    first: int = 0
    holes: bool = False
    extra: Tensor | None = None
    lanes: Tensor | None = None
    shared: bool = False
    formed: bool = False


class EvictedEntries(NamedTuple):
    """Entries that leave: keys, values (lanes, n, dim), slots (lanes, n), -1 for none.

    scores: (lanes, n) float32 where the store asks for them. extra: (lanes, n) float32, for how many tokens besides its
    own each stands, and newest: the last slot among those; where the store merges. holes: whether any slot may be -1.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    scores: Tensor | None = None
    extra: Tensor | None = None
    newest: Tensor | None = None
    holes: bool = True
