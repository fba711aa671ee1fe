"""Intervals by hand, by tables and by their coverage of the mean; ranks by their definitions."""

from __future__ import annotations

import math
import random
from collections import Counter
from statistics import fmean

import numpy
import pytest
import torch
from kvkeep_lab.statistics import (
    Estimate,
    conditional_entropy,
    each,
    effective_rank,
    estimate,
    mean,
    rank_correlation,
    student,
    where,
)


def test_bootstrap_intervals_equal_those_computed_by_hand() -> None:
    assert estimate([0.5]) == Estimate(0.5, 0.5, 0.5, 1)
    assert estimate([2.0] * 5) == Estimate(2.0, 2.0, 2.0, 5)
    draw = random.Random(0)
    values = [draw.gauss(3, 1) for _ in range(400)]
    found = estimate(values)
    assert found.mean == pytest.approx(fmean(values)) and found == estimate(values)
    assert found.high - found.mean == pytest.approx(1.96 / 20, rel=0.15)  # the normal interval, for so many
    assert found.mean - found.low == pytest.approx(1.96 / 20, rel=0.15)


@pytest.mark.parametrize(
    ("count", "share", "quantile"),
    [(2, 0.95, 12.706), (3, 0.95, 4.303), (4, 0.95, 3.182), (5, 0.99, 4.604), (6, 0.95, 2.571), (31, 0.95, 2.042)],
)
def test_student_intervals_equal_those_of_tables(count: int, share: float, quantile: float) -> None:
    values = [float(number) for number in range(count)]
    deviation = math.sqrt(sum((value - fmean(values)) ** 2 for value in values) / (count - 1))
    found = student(values, share)
    assert found.high - found.mean == pytest.approx(quantile * deviation / math.sqrt(count), rel=1e-3)
    assert found.mean - found.low == pytest.approx(found.high - found.mean) and found.n == count


def test_student_intervals_stay_on_the_scale_and_few_equal_values_stay_uncertain() -> None:
    assert student([0.3]) == Estimate(0.3, -math.inf, math.inf, 1)
    assert student([0.3], scale=(0.0, 1.0)) == Estimate(0.3, 0.0, 1.0, 1)
    assert student([0.0, 1.0], scale=(0.0, 1.0)) == Estimate(0.5, 0.0, 1.0, 2)
    assert student([2.0] * 4) == Estimate(2.0, 2.0, 2.0, 4)  # no scale to go by
    few, many = (student([0.0] * count, scale=(0.0, 1.0)) for count in (5, 50))
    assert few.mean == 0.0 and few.low == 0.0 and 0.4 < few.high < 0.6  # Clopper and Pearson: 0.52
    assert 0.04 < many.high < 0.1  # and 0.07


def test_student_intervals_cover_the_mean_of_few_values() -> None:
    draw = random.Random(0)
    samples = [[draw.gauss(0, 1) for _ in range(3)] for _ in range(300)]
    covered = {
        name: fmean(found.low <= 0 <= found.high for found in map(of, samples))
        for name, of in (("student", student), ("bootstrap", estimate))
    }
    assert 0.92 < covered["student"] < 0.98 and covered["bootstrap"] < 0.85


def test_effective_rank_follows_the_papers_definition() -> None:
    values = numpy.sort(numpy.random.default_rng(0).random((5, 16)) ** 4)[:, ::-1].copy()
    for mine, row in zip(effective_rank(torch.from_numpy(values), 0.9).tolist(), values, strict=True):
        expected = next(r for r in range(1, 17) if row[:r].sum() >= 0.9 * row.sum())
        assert mine == expected


def test_rank_correlation_handles_ties_and_constants() -> None:
    a = torch.tensor([3.0, 1.0, 4.0, 1.5])
    assert rank_correlation(a, a.exp()) == pytest.approx(1) and rank_correlation(a, -a) == pytest.approx(-1)
    assert rank_correlation(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(0.75**0.5)
    assert rank_correlation(a[:2], a[:2]) is None and rank_correlation(torch.ones(4), a) is None


def test_rows_are_filtered_and_averaged_by_field() -> None:
    rows = [Estimate(1.0, 0.0, 2.0, 3), Estimate(3.0, 0.0, 4.0, 3), Estimate(5.0, 1.0, 4.0, 2)]
    assert where(rows, low=0.0, n=3) == rows[:2] and where(rows, low=9.0) == []
    assert each(rows, "n") == [3, 2] and each(rows, "low", "n") == [(0.0, 3), (1.0, 2)]
    assert mean(rows, "mean") == 3.0 and mean([], "mean") is None


def test_conditional_entropy_equals_its_definition() -> None:
    """The entropy of the outcomes for each given value, weighted by the frequency of the value."""
    draw = torch.Generator().manual_seed(0)
    for things, values in ((1, 4), (5, 3), (40, 2), (3, 1)):
        given, outcomes = (torch.randint(limit, (60, 2), generator=draw) for limit in (things, values))
        expected = 0.0
        for thing, often in Counter(map(tuple, given.tolist())).items():
            rows = (tuple(row) for row, of in zip(outcomes.tolist(), given.tolist(), strict=True) if tuple(of) == thing)
            shares = [count / often for count in Counter(rows).values()]
            expected -= often / 60 * sum(share * math.log2(share) for share in shares)
        assert conditional_entropy(outcomes, given) == pytest.approx(expected, abs=1e-9)
        assert conditional_entropy(given, given) == 0  # what is given decides itself, to the last digit
