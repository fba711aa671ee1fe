"""The median of three, by its density: KVReviver's Lemmas 1 and 2 (docs/results/kvreviver.md, "Lemmas 1 and 2")."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from statistics import fmean, median

import pytest
import torch
from kvkeep_lab.published.sketch_variants import MEDIAN
from torch import Tensor

Quantile = Callable[[Tensor], Tensor]
"""x by F(x), of a symmetric distribution around 0."""


def integral(factor: float, quantile: Quantile, power: int) -> float:
    """The integral of x^power · factor F (1 - F) f, in F: the mean of the integrand at midpoints."""
    level = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    return float((quantile(level) ** power * factor * level * (1 - level)).mean())


def variance(quantile: Quantile) -> float:
    level = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    return float((quantile(level) ** 2).mean())


def normal(level: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * level - 1)


def uniform(level: Tensor) -> Tensor:
    return 2 * level - 1


def laplace(level: Tensor) -> Tensor:
    return -torch.sign(level - 0.5) * torch.log1p(-2 * (level - 0.5).abs())


def two_modes(level: Tensor) -> Tensor:
    """Uniform within 0.02 of -1 or of 1."""
    return torch.sign(level - 0.5) * (0.98 + 0.04 * (level - 0.5).abs() * 2)


@pytest.mark.parametrize("quantile", [normal, uniform, laplace, two_modes])
def test_the_density_has_the_factor_six(quantile: Quantile) -> None:
    assert integral(6, quantile, 0) == pytest.approx(1, abs=1e-6)
    assert integral(3, quantile, 0) == pytest.approx(1 / 2, abs=1e-6)  # the paper's


def test_the_value_of_lemma_2_needs_six() -> None:
    assert integral(6, normal, 2) == pytest.approx(1 - math.sqrt(3) / math.pi, abs=1e-4)
    assert integral(6, normal, 2) == pytest.approx(MEDIAN[3], abs=1e-3) == 0.448
    assert integral(3, normal, 2) == pytest.approx(0.224, abs=1e-3)


def test_three_coins_have_the_variance_of_one() -> None:
    """So equality is not of constants only, and no factor below 1 holds for all symmetric distributions."""
    medians = [median(coins) for coins in product((-1, 1), repeat=3)]
    assert fmean(medians) == 0 and fmean(value * value for value in medians) == 1
    assert integral(6, two_modes, 2) / variance(two_modes) > 0.98


@pytest.mark.parametrize(("quantile", "ratio"), [(uniform, 0.6), (normal, 0.4487), (laplace, 0.3194)])
def test_one_mode_has_at_most_three_fifths(quantile: Quantile, ratio: float) -> None:
    assert integral(6, quantile, 2) / variance(quantile) == pytest.approx(ratio, abs=1e-3)
