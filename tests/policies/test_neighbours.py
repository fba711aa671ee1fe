"""Keys of merged pairs: formulas against automatic differentiation and brute force, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvkeep.policies.fates.kvslimmer import KVSlimmer, curvatures
from kvkeep.stores.evicted.pairs import Pairs

DIM, SCALE = 4, 0.5  # 1 / sqrt(DIM)


class Case:
    """One query over a few entries; the first two are the pair."""

    def __init__(self, seed: int, entries: int = 12, line: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.query, self.keys, self.values = draw(DIM), draw(entries, DIM), draw(entries, DIM)
        if line:  # all values on one line, the pair's on the same side of the others
            direction = draw(DIM)
            places = torch.cat([1.5 + torch.rand(2, generator=generator, dtype=torch.float64), draw(entries - 2) * 0.3])
            self.values = places[:, None] * direction
        self.keys[1] = self.keys[0] + 0.05 * draw(DIM)  # homogeneous neighbours
        self.gradient = draw(DIM)

    def output(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([first[None], second[None], self.keys[2:]])
        return (keys @ self.query * SCALE).softmax(0) @ self.values

    @property
    def weights(self) -> torch.Tensor:
        return (self.keys @ self.query * SCALE).softmax(0)

    def pairs(self) -> Pairs:
        first, second = self.weights[:2]
        return Pairs(
            (self.keys[None, :1], self.keys[None, 1:2]),
            (self.values[None, :1], self.values[None, 1:2]),
            (first.view(1, 1), second.view(1, 1)),
            self.output(*self.keys[:2])[None, None],
            None,
            torch.ones(1, 1, dtype=torch.bool),
        )

    def hessian(self, gradient: torch.Tensor) -> Any:
        """Of E o by both keys, E held."""
        loss = lambda first, second: gradient @ self.output(first, second)  # noqa: E731
        return torch.autograd.functional.hessian(loss, (self.keys[0], self.keys[1]))

    def best(self, loss: Any) -> float:
        """The share of the first key of least loss, by trying."""
        shares = torch.linspace(-1, 2, 3001, dtype=torch.float64)
        keys = shares[:, None] * self.keys[0] + (1 - shares[:, None]) * self.keys[1]
        return float(shares[torch.stack([loss(key) for key in keys]).argmin()])


@pytest.mark.parametrize("seed", range(5))
def test_curvatures_equal_the_second_derivatives(seed: int) -> None:
    """Eqs. 20-22: h = (E c) q q^T / d."""
    case = Case(seed)
    (first, both), (_, other) = case.hessian(case.gradient)
    outer = torch.outer(case.query, case.query) * SCALE**2
    c11, c22, c12 = (c[0, 0] for c in curvatures(case.pairs()))
    for block, curvature in ((first, c11), (other, c22), (both, c12)):
        torch.testing.assert_close(block, (case.gradient @ curvature) * outer)


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_form_is_the_best_share_if_residuals_are_parallel(seed: int) -> None:
    """Eq. 32 is exact then. Brute force minimises the second-order loss, with Hessians by automatic differentiation,
    and the loss of Eq. 1 itself: the squared change of the output."""
    case = Case(seed, entries=40, line=True)
    share = float(KVSlimmer().share(case.pairs()))
    assert 0 < share < 1
    before = case.output(*case.keys[:2])
    gradient = case.values[0] - before  # along the line
    (first, both), (_, other) = case.hessian(gradient)

    def second_order(key: torch.Tensor) -> torch.Tensor:
        one, two = key - case.keys[0], key - case.keys[1]
        return one @ first @ one / 2 + one @ both @ two + two @ other @ two / 2

    assert share == pytest.approx(case.best(second_order), abs=2e-3)
    replaced = case.best(lambda key: (case.output(key, key) - before).square().sum())
    assert share == pytest.approx(replaced, abs=0.05)  # the first derivatives weigh by a, not by a (1 - 2 a)


def test_the_closed_form_is_wrong_if_the_output_lies_between_the_values() -> None:
    """Eq. 32 assumes the same angle of both residuals with the gradient. If they point apart, the best share is outside
    [0, 1]."""
    case = Case(1, entries=40, line=True)
    before = case.output(*case.keys[:2])
    case.values[1] = before - 0.5 * (case.values[0] - before)
    before = case.output(*case.keys[:2])
    best = case.best(lambda key: (case.output(key, key) - before).square().sum())
    assert not -0.1 <= best <= 1.1
    assert 0 < float(KVSlimmer().share(case.pairs())) < 1


def test_shares_leave_the_segment_if_one_entry_has_most_attention() -> None:
    case = Case(2, line=True)
    pairs = case.pairs()
    uneven, nothing = (
        Pairs(pairs.keys, pairs.values, tuple(torch.tensor(given).view(2, 1, 1)), pairs.output, None, pairs.real)
        for given in ((0.6, 0.01), (0.0, 0.0))
    )
    assert not 0 <= float(KVSlimmer().share(uneven)) <= 1
    assert KVSlimmer().share(nothing).isnan().all()
