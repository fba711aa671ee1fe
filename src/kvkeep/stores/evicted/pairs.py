"""One pass of merging neighbours: choosing disjoint pairs of a row, and merging them. Pure functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.contracts.entries import gathered

ROUNDS = 12
"""The maximum number of rounds that take all local minima; pairs that are still undecided wait for the next pass."""


@dataclass(frozen=True)
class Pairs:
    """Neighbours to be merged: the first of each pair, and the second. Tensors are (lanes, pairs, ...)."""

    keys: tuple[Tensor, Tensor]
    """Keys rotated to the position of the first, float32."""
    values: tuple[Tensor, Tensor]
    """The mean value of the tokens that each entry stands for."""
    attention: tuple[Tensor, Tensor]
    """The weight of each entry, its count included: the mean over the queries that could see it."""
    output: Tensor | None
    """(lanes, 1, value_dim), the layer's output, averaged in the same way; None where the store does not record it."""
    clues: tuple[Tensor, Tensor] | None
    """Further data of each entry (:meth:`~kvkeep.stores.evicted.neighbours.MergeNeighbours.clues`)."""
    real: Tensor
    """(lanes, pairs) bool; False marks an empty place."""


class PairMerging(ABC):
    """How two neighbours become one entry."""

    sinks: int
    """The number of first entries of a row that are never merged."""
    cap: int
    """The largest count of an entry; 0: no limit."""

    @abstractmethod
    def share(self, pairs: Pairs) -> Tensor:
        """Return the first key's share of the merged one, (lanes, pairs, 1 or dim); the second's is the rest. The
        caller clamps and counts shares that are outside [0, 1] or NaN."""


@dataclass
class OrderedEntries:
    """The input of a pass: entries of all lanes of a bank in the order of the text, gaps (slot -1) first."""

    keys: Tensor
    """(lanes, entries, key_dim)"""
    values: Tensor
    """(lanes, entries, value_dim)"""
    slots: Tensor
    """(lanes, entries), -1 for a gap."""
    counts: Tensor
    """(lanes, entries) float32, the number of tokens that an entry stands for, at most the cap."""
    attention: Tensor
    """(lanes, entries) float32"""
    known: Tensor
    """(lanes, entries) bool: some query has seen the entry."""
    clues: Tensor | None = None
    """(lanes, entries, any), further data of each entry; for a merged entry, the sum of both."""

    def at(self, index: Tensor) -> OrderedEntries:
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return OrderedEntries(**{name: gathered(part, index) for name, part in parts if part is not None})

    def after(self, at: Tensor, real: Tensor, **merged: Tensor) -> OrderedEntries:
        """Return the entries with new values in some fields at ``at`` (lanes, n), where ``real``."""
        return replace(self, **{name: _written(getattr(self, name), at, new, real) for name, new in merged.items()})


class Merged(NamedTuple):
    """The result of a pass."""

    entries: OrderedEntries
    tally: Tensor
    """(2,), the number of merged pairs, and of those with a clamped share."""


def cheapest(entries: OrderedEntries, start: Tensor | int, wanted: Tensor) -> Tensor:
    """Return which pairs of entries to merge, (lanes, n) bool, ``wanted`` (lanes, 1) at most: those with the least
    attention, of entries that queries have seen, at slots from ``start`` on."""
    may = entries.known & (entries.slots >= start)
    cost = (entries.attention + entries.attention.roll(-1, 1)).masked_fill(~(may & may.roll(-1, 1)), torch.inf)
    cost[:, -1] = torch.inf
    return cheapest_pairs(cost, wanted)


def cheapest_pairs(cost: Tensor, wanted: Tensor) -> Tensor:
    """Return which pairs to take: (lanes, n) bool, pair i being entries i and i + 1.

    cost: (lanes, n), inf for pairs that must not merge. wanted: (lanes, 1), the maximum number of pairs. No two chosen
    pairs share an entry. The result is that of a greedy choice by cost, where the first of equal costs wins. A greedy
    choice contains every pair that is cheaper than both its neighbours. So each round takes all of these at once and
    removes their neighbours.
    """
    chosen = torch.zeros(cost.shape, dtype=torch.bool, device=cost.device)
    left = cost.clone()
    for _ in range(ROUNDS):
        padded = torch.nn.functional.pad(left, (1, 1), value=float("inf"))
        least = (left < padded[:, :-2]) & (left <= padded[:, 2:]) & (left < float("inf"))
        chosen |= least
        beside = torch.nn.functional.pad(least, (1, 1))
        left = left.masked_fill(least | beside[:, :-2] | beside[:, 2:], float("inf"))
    order = cost.masked_fill(~chosen, float("inf")).argsort(dim=1, stable=True).argsort(1)
    return chosen & (order < wanted)


def merge(
    entries: OrderedEntries,
    chosen: Tensor,
    how: PairMerging,
    turned: Callable[[Tensor, Tensor], Tensor],
    output: Tensor | None,
) -> Merged:
    """Merge the ``chosen`` pairs, (lanes, n) bool, and close the gaps.

    turned: a function that rotates keys (lanes, n, dim) by a number of positions (lanes, n). output: the layer's mean
    output, (lanes, 1, value_dim), for methods that use it.
    """
    pairs = int(chosen.sum(1).max())
    at = (~chosen).int().argsort(dim=1, stable=True)[:, :pairs]
    real = chosen.gather(1, at)
    one, two = entries.at(at), entries.at(at + real)  # without a pair, the second is the entry itself
    dtype, keys = entries.keys.dtype, one.keys.float()
    second, values = turned(two.keys.float(), -one.counts), (one.values.float(), two.values.float())
    clues = None if one.clues is None or two.clues is None else (one.clues, two.clues)
    share = how.share(Pairs((keys, second), values, (one.attention, two.attention), output, clues, real))
    bad = real[..., None] & ~((share >= 0) & (share <= 1))
    share = share.nan_to_num(nan=0.5).clamp(0, 1)
    counts = one.counts + two.counts
    total = one.counts[..., None] * values[0] + two.counts[..., None] * values[1]
    counts = counts.clamp(max=how.cap) if how.cap else counts
    result = entries.after(
        at,
        real,
        keys=(share * keys + (1 - share) * second).to(dtype),
        values=(total / counts.clamp(min=1)[..., None]).to(dtype),
        slots=two.slots,
        counts=counts,
        attention=one.attention + two.attention,
        **({} if clues is None else {"clues": clues[0] + clues[1]}),
    )
    gone = torch.nn.functional.pad(chosen, (1, 0))[:, :-1]
    result.slots, result.counts = result.slots.masked_fill(gone, -1), result.counts.masked_fill(gone, 0)
    if how.cap:
        # A clamped count moves earlier entries closer to the end.
        nearer = _from_end(entries.counts) - _from_end(result.counts)
        if bool(nearer.any()):
            result.keys = turned(result.keys.float(), nearer).to(dtype)
    tally = torch.stack([real.sum(), bad.any(2).sum()])
    return Merged(result.at(result.slots.argsort(dim=1, stable=True)), tally)


def _from_end(counts: Tensor) -> Tensor:
    """Return the sum of the counts from each entry on."""
    return counts.flip(1).cumsum(1).flip(1)


def _written(rows: Tensor, index: Tensor, new: Tensor, real: Tensor) -> Tensor:
    """Return ``rows`` with ``new`` at ``index`` where ``real``."""
    wide = index if rows.ndim == 2 else index[..., None].expand_as(new)
    mask = real if rows.ndim == 2 else real[..., None]
    return rows.scatter(1, wide, torch.where(mask, new, rows.gather(1, wide)))
