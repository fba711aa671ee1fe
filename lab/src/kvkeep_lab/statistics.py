"""Means with intervals, ranks and rank correlation."""

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
    """Return the rows with these values of fields."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def each(rows: Iterable[Any], *names: str) -> list[Any]:
    """Return the distinct values of a field, or of several fields together, in the order of the rows."""
    return list(dict.fromkeys(map(attrgetter(*names), rows)))


def mean(rows: Iterable[Any], name: str) -> float | None:
    """Return the mean of a field over the rows that have it; None if no row has it."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return fmean(values) if values else None


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` numbers and its 95 % interval. For one number, low and high equal the mean."""

    mean: float
    low: float
    high: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of ``values`` (at least one) and its percentile bootstrap interval. The interval contains 95 % of
    the means of :data:`RESAMPLES` samples, each drawn from ``values`` with replacement. The draws are the same in every
    call."""
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
    """Return the mean of ``values`` (at least one) and Student's interval that covers ``share``. Student's interval is
    wide enough for few numbers, where a bootstrap interval is too narrow (with two numbers it covers their mean half
    the time).

    scale: the minimum and maximum possible numbers. The interval is limited to the scale. If both are finite and all
    numbers are equal, one more number is assumed at either end, because few equal numbers say little. With one number,
    the interval is the scale.
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
    """Return t such that Student's distribution with ``freedom`` degrees lies between -t and t with probability
    ``share``."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability of the interval from -t to t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (number - 1) / number
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def effective_rank(energies: Tensor, share: float) -> Tensor:
    """Return the number of ``energies`` (..., modes), in falling order, whose sum reaches a ``share`` of the total
    (KV-Direct, Eqs. 19-20): (...) float32."""
    total = energies.double().cumsum(-1)
    return (total < share * total[..., -1:]).sum(-1).float() + 1


def rank_correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Spearman's correlation of two vectors, with mean ranks for ties; None if it is undefined."""
    if len(a) < 3 or a.unique().numel() < 2 or b.unique().numel() < 2:
        return None
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def conditional_entropy(outcomes: Tensor, given: Tensor) -> float:
    """Return H(outcome | given) in bits. Each row (n, ...) is an observation; rows are equal if all their bits are. The
    result is the entropy of the frequencies, without a correction for small samples; it is 0 if ``given`` determines
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
