"""Means with intervals, ranks and their correlation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any, TypeVar

import torch
from torch import Tensor

RESAMPLES = 2000
T = TypeVar("T")


def where(rows: Iterable[T], **fields: Any) -> list[T]:
    """Return the rows whose fields are these."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def each(rows: Iterable[Any], *names: str) -> list[Any]:
    """Return the values of a field, or of several together, in the order of the rows and each once."""
    return list(dict.fromkeys(map(attrgetter(*names), rows)))


def mean(rows: Iterable[Any], name: str) -> float | None:
    """Return the mean of a field over the rows that have it; None where none has."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return fmean(values) if values else None


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; ``n`` numbers. Of one number there is no interval: low and high are the mean."""

    mean: float
    low: float
    high: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of ``values`` (one at least) and its percentile bootstrap interval: between which values 95 % of
    the means of :data:`RESAMPLES` samples lie, each drawn from ``values`` with replacement. The draws are always the
    same ones."""
    given = torch.tensor(list(values), dtype=torch.float64)
    if len(given) == 1:
        return Estimate(float(given), float(given), float(given), 1)
    generator = torch.Generator().manual_seed(0)
    drawn = given[torch.randint(len(given), (RESAMPLES, len(given)), generator=generator)].mean(dim=1)
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(given.mean()), low, high, len(given))


def student(
    values: Sequence[float], share: float = 0.95, scale: tuple[float, float] = (-math.inf, math.inf)
) -> Estimate:
    """Return the mean of ``values`` (one at least) and Student's interval that covers ``share``: of few numbers it is
    as wide as it has to be, where a bootstrap interval is too narrow (of two numbers it covers their mean half the
    time).

    scale: the least and the greatest that a number can be. The interval does not leave it; and where both are finite
    and all numbers are the same, which says little of so few, it is as if there were one more at either end. Of one
    number the interval is the scale.
    """
    count, mean, (least, greatest) = len(values), fmean(values), scale
    if count == 1:
        return Estimate(mean, least, greatest, 1)
    same = min(values) == max(values) and math.isfinite(greatest - least)
    given = [*values, least, greatest] if same else list(values)
    reach = _quantile(share, len(given) - 1) * stdev(given) / math.sqrt(len(given))
    centre = fmean(given)
    return Estimate(mean, max(centre - reach, least), min(centre + reach, greatest), count)


def _quantile(share: float, freedom: int) -> float:
    """Return t for which Student's distribution of ``freedom`` degrees lies between -t and t with ``share``."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability of -t to t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (number - 1) / number
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def effective_rank(energies: Tensor, share: float) -> Tensor:
    """Return how many of the ``energies`` (..., modes), falling, it takes to hold a ``share`` of their sum (KV-Direct,
    Eqs. 19-20): (...) float32."""
    total = energies.double().cumsum(-1)
    return (total < share * total[..., -1:]).sum(-1).float() + 1


def rank_correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Spearman's correlation of two vectors, ties at their mean rank; None where there is none."""
    if len(a) < 3 or a.unique().numel() < 2 or b.unique().numel() < 2:
        return None
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def conditional_entropy(outcomes: Tensor, given: Tensor) -> float:
    """Return H(outcome | given), in bits, of as many observations as there are rows (n, ...), which are the same where
    all their bits are: the entropy of their frequencies, without a correction for few. 0 where what is given decides
    the outcome."""
    seen, joint = given.unique(dim=0, return_inverse=True), outcomes.unique(dim=0, return_inverse=True)
    pairs = torch.stack([seen[1], joint[1]], dim=1).unique(dim=0, return_counts=True)[1]
    of_given = seen[1].bincount()
    return max(0.0, _entropy(pairs) - _entropy(of_given)) if len(pairs) > len(of_given) else 0.0


def _entropy(counts: Tensor) -> float:
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


def _ranks(values: Tensor) -> Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[places]
