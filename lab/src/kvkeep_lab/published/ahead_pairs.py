"""Pairs that overlap, as AsymKV's and KVSlimmer's published code merges them. Pure functions, of one look ahead.

Entries of a lane are numbered in the order of the text, and pair i is of entries i and i + 1. The pairs of least cost
are merged at once, and two of them may share an entry. Entry i becomes pair i and entry i + 1 goes: of a run of chosen
pairs only the first becomes an entry, and what it did not take in is lost.

Facts are from github.com/the-scale-lab/Asymkv (asymkv/method) and github.com/lianjunl13-sudo/KVSlimmer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

GAMMA = 4096 / math.log(512)
"""Entries after which a pair costs 1/e of what it would."""

EPS = 1e-21
"""Added to what is divided by."""


@dataclass(frozen=True)
class Seen:
    """What a chunk makes of the entries before it. Tensors are (lanes, entries, ...), float32.

    attention: what an entry received of the chunk's queries, its count included: the sum over queries, mean over the
    heads of the lane. sums: values added up, not divided by the counts. merges: bool, entries that may merge, the sinks
    left out. gradient: of the loss by the keys as they are before rotation, for methods with :attr:`gradients`.
    """

    attention: Tensor
    sums: Tensor
    merges: Tensor
    gradient: Tensor | None = None

    @property
    def alpha(self) -> Tensor:
        """The attention of entries that may merge, so that it adds up to 1: (lanes, entries)."""
        merging = self.attention * self.merges
        return merging / (merging.sum(1, keepdim=True) + EPS)


class AheadMerging(ABC):
    """How the key of a pair is made. sinks: first entries of a row that are never merged. cap: the largest count, 0 for
    none. gradients: a chunk's loss is differentiated by the keys. averages: sensitivities are means over the chunks so
    far; then they have one number an entry."""

    gradients: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    sinks: int
    cap: int

    @abstractmethod
    def sensitivity(self, seen: Seen) -> Tensor:
        """Return how much each key matters to the chunk, (lanes, entries, 1 or dim)."""

    @abstractmethod
    def weights(self, alpha: tuple[Tensor, Tensor], sensitivity: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the weights of both keys of each pair, not normalised, (lanes, pairs, 1 or dim). alpha:
        :attr:`Seen.alpha` of the first and the second, (lanes, pairs, 1)."""


class Paired(NamedTuple):
    """Entries after pairs were merged, (lanes, entries, ...), in their old places. kept: which are still there. keys:
    before rotation. sums: values added up."""

    keys: Tensor
    sums: Tensor
    counts: Tensor
    slots: Tensor
    sensitivity: Tensor
    kept: Tensor


def costs(seen: Seen, counts: Tensor, heads: int) -> Tensor:
    """Return the cost of every pair, (rows, entries - 1), inf where it cannot be merged: attention added up over the
    ``heads`` lanes of a row, times the counts of both, and less the later the pair is."""
    of_row = _pairs(seen.attention).unflatten(0, (-1, heads)).sum(1)
    number = seen.merges[::heads].cumsum(1)[:, :-1]  # from 1 on, the first entry that may merge
    cost = of_row * _pairs(counts)[::heads] / (number / GAMMA).exp()
    return cost.masked_fill(~(seen.merges[::heads, :-1] & seen.merges[::heads, 1:]), math.inf)


def cheapest(cost: Tensor, wanted: Tensor) -> Tensor:
    """Return the ``wanted`` (rows, 1) pairs of least cost, (rows, pairs) bool; the first of those that tie."""
    order = cost.argsort(dim=1, stable=True).argsort(1)
    return (order < wanted) & (cost < math.inf)


def merge(
    keys: Tensor,
    counts: Tensor,
    slots: Tensor,
    seen: Seen,
    sensitivity: Tensor,
    chosen: Tensor,
    how: AheadMerging,
) -> Paired:
    """Merge the ``chosen`` pairs (lanes, pairs) bool. keys (lanes, entries, dim): before rotation, float32. slots: the
    last that each entry stands for, as is then that of the second."""
    alpha = seen.alpha[..., None]
    first, second = how.weights((alpha[:, :-1], alpha[:, 1:]), (sensitivity[:, :-1], sensitivity[:, 1:]))
    total = first + second + EPS
    first, second = first / total, second / total
    joined = first * keys[:, :-1] + second * keys[:, 1:]
    count = _pairs(counts)
    count = count.clamp(max=how.cap) if how.cap else count
    curvature = first.square() * sensitivity[:, :-1] + second.square() * sensitivity[:, 1:]
    gone = torch.nn.functional.pad(chosen, (1, 0))
    return Paired(
        _where(chosen, joined, keys),
        _where(chosen, _pairs(seen.sums), seen.sums),
        _where(chosen, count, counts),
        _where(chosen, slots[:, 1:], slots),
        _where(chosen, curvature, sensitivity) if how.averages else sensitivity,
        (slots >= 0) & ~gone,
    )


def _pairs(rows: Tensor) -> Tensor:
    """Return each entry plus the next one."""
    return rows[:, :-1] + rows[:, 1:]


def _where(chosen: Tensor, pairs: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows`` (lanes, entries, ...) with those of ``pairs`` (lanes, entries - 1, ...) where ``chosen``."""
    flags = chosen if rows.ndim == 2 else chosen[..., None]
    return torch.cat([torch.where(flags, pairs, rows[:, :-1]), rows[:, -1:]], 1)
