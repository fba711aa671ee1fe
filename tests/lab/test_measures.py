"""Effective rank and rank correlation against their definitions."""

from __future__ import annotations

import numpy
import pytest
import torch
from kvkeep_lab.statistics import effective_rank, rank_correlation


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_a_matrix_of_known_rank(rank: int) -> None:
    """All directions alike: as many as it takes to hold the share."""
    a, b = (torch.linalg.qr(torch.randn(20, rank, generator=torch.Generator().manual_seed(rank)))[0] for _ in range(2))
    energies = torch.linalg.svdvals(a @ b.T).square()
    assert effective_rank(energies, 0.999) == rank
    assert effective_rank(energies, 0.5) == -(-rank // 2)


def test_effective_rank_is_the_paper_s() -> None:
    values = numpy.sort(numpy.random.default_rng(0).random((5, 16)) ** 4)[:, ::-1].copy()
    for mine, row in zip(effective_rank(torch.from_numpy(values), 0.9).tolist(), values, strict=True):
        expected = next(r for r in range(1, 17) if row[:r].sum() >= 0.9 * row.sum())
        assert mine == expected


def test_rank_correlation() -> None:
    a = torch.tensor([3.0, 1.0, 4.0, 1.5])
    assert rank_correlation(a, a.exp()) == pytest.approx(1) and rank_correlation(a, -a) == pytest.approx(-1)
    assert rank_correlation(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(0.75**0.5)
    assert rank_correlation(a[:2], a[:2]) is None and rank_correlation(torch.ones(4), a) is None
