"""Means of few numbers, and how sure one can be of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 2000


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
