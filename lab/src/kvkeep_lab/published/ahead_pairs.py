"""Merging of overlapping pairs, as in the published code of AsymKV and KVSlimmer. Pure functions.

Entries of a lane are numbered in the order of the text. Pair i consists of the entries i and i + 1. The pairs of least
cost are merged at the same time, and two of them may share an entry. Pair i replaces entry i, and entry i + 1 is
dropped. In a run of chosen pairs only the first pair becomes an entry; the later entries of the run are lost.

Sources: github.com/the-scale-lab/Asymkv (asymkv/method) and github.com/lianjunl13-sudo/KVSlimmer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

GAMMA = 4096 / math.log(512)
"""Number of entries over which the cost of a pair decreases by a factor of e."""

EPS = 1e-21
"""Constant added to divisors."""


@dataclass(frozen=True)
class Seen:
    """The entries before a chunk, with the attention that they receive from it. Tensors are (lanes, entries, ...),
    float32."""

    attention: Tensor
    """Attention from the chunk's queries, weighted by the entry's count: the sum over queries, the mean over the heads
    of the lane."""
    sums: Tensor
    """Sums of values, not divided by the counts."""
    merges: Tensor
    """Bool: entries that may merge. Sinks may not."""
    gradient: Tensor | None = None
    """Gradient of the loss by the keys before rotation, for methods with :attr:`AheadMerging.gradients`."""

    @property
    def alpha(self) -> Tensor:
        """The attention of entries that may merge, normalised to a sum of 1: (lanes, entries)."""
        merging = self.attention * self.merges
        return merging / (merging.sum(1, keepdim=True) + EPS)


class AheadMerging(ABC):
    """The rule that computes the key of a pair."""

    gradients: ClassVar[bool] = False
    """Whether the chunk's loss is differentiated by the keys."""
    averages: ClassVar[bool] = False
    """Whether sensitivities are means over all chunks read; such a sensitivity is one number per entry."""
    sinks: int
    """Number of first entries of a row that are never merged."""
    cap: int
    """Maximum count of an entry; 0: no maximum."""

    @abstractmethod
    def sensitivity(self, seen: Seen) -> Tensor:
        """Return the sensitivity of the chunk to each key, (lanes, entries, 1 or dim)."""

    @abstractmethod
    def weights(self, alpha: tuple[Tensor, Tensor], sensitivity: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the unnormalised weights of both keys of each pair, (lanes, pairs, 1 or dim). alpha:
        :attr:`Seen.alpha` of the first and the second entries, (lanes, pairs, 1)."""


class Paired(NamedTuple):
    """Entries after pairs were merged, (lanes, entries, ...), in their old places."""

    keys: Tensor
    """Keys before rotation."""
    sums: Tensor
    """Sums of values."""
    counts: Tensor
    slots: Tensor
    sensitivity: Tensor
    kept: Tensor
    """Bool: places that still have an entry."""


def costs(seen: Seen, counts: Tensor, heads: int) -> Tensor:
    """Return the cost of every pair, (rows, entries - 1), inf for pairs that cannot merge. The cost is the attention,
    summed over the ``heads`` lanes of a row, times the sum of both counts. It decreases with the pair's position."""
    of_row = _pairs(seen.attention).unflatten(0, (-1, heads)).sum(1)
    number = seen.merges[::heads].cumsum(1)[:, :-1]  # 1 for the first entry that may merge
    cost = of_row * _pairs(counts)[::heads] / (number / GAMMA).exp()
    return cost.masked_fill(~(seen.merges[::heads, :-1] & seen.merges[::heads, 1:]), math.inf)


def cheapest(cost: Tensor, wanted: Tensor) -> Tensor:
    """Return the ``wanted`` (rows, 1) pairs of least cost, (rows, pairs) bool; earlier pairs win ties."""
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
    """Merge the ``chosen`` pairs, (lanes, pairs) bool. keys: before rotation, (lanes, entries, dim) float32. slots: the
    last slot that each entry represents; a merged entry has the slot of its second entry."""
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
    """Return the sum of each entry and the next one."""
    return rows[:, :-1] + rows[:, 1:]


def _where(chosen: Tensor, pairs: Tensor, rows: Tensor) -> Tensor:
    """Return ``rows`` (lanes, entries, ...) with those of ``pairs`` (lanes, entries - 1, ...) where ``chosen``."""
    flags = chosen if rows.ndim == 2 else chosen[..., None]
    return torch.cat([torch.where(flags, pairs, rows[:, :-1]), rows[:, -1:]], 1)
