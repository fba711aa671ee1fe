"""How a pair's key is made: the formulas against automatic differentiation and brute force, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvkeep.policies.fates.asymkv import AsymKV, energy
from kvkeep.policies.fates.kvslimmer import KVSlimmer, curvatures
from kvkeep.policies.fates.kvslimmer_exact import KVSlimmerExact
from kvkeep.stores.pairs import Asked, Pairs

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
def test_the_second_derivatives_are_the_papers(seed: int) -> None:
    """Eqs. 20-22: h = (E c) q q^T / d."""
    case = Case(seed)
    (own, both), (_, other) = case.hessian(case.gradient)
    outer = torch.outer(case.query, case.query) * SCALE**2
    c11, c22, c12 = (c[0, 0] for c in curvatures(case.pairs()))
    for block, curvature in ((own, c11), (other, c22), (both, c12)):
        torch.testing.assert_close(block, (case.gradient @ curvature) * outer)


@pytest.mark.parametrize("seed", range(5))
def test_where_residuals_are_parallel_the_closed_form_is_the_best_share(seed: int) -> None:
    """There Eq. 32 holds exactly. Tried by brute force: of the second-order loss, with Hessians by automatic
    differentiation, and of the loss of Eq. 1 itself, the squared change of the output when both keys are replaced."""
    case = Case(seed, entries=40, line=True)
    share = float(KVSlimmer().share(case.pairs()))
    assert 0 < share < 1
    before = case.output(*case.keys[:2])
    gradient = case.values[0] - before  # along the line
    (own, both), (_, other) = case.hessian(gradient)

    def second_order(key: torch.Tensor) -> torch.Tensor:
        one, two = key - case.keys[0], key - case.keys[1]
        return one @ own @ one / 2 + one @ both @ two + two @ other @ two / 2

    assert share == pytest.approx(case.best(second_order), abs=2e-3)
    replaced = case.best(lambda key: (case.output(key, key) - before).square().sum())
    assert share == pytest.approx(replaced, abs=0.05)  # the first derivatives weigh by a, not by a (1 - 2 a)


def test_where_the_output_lies_between_the_values_the_closed_form_is_off() -> None:
    """Eq. 32 takes both residuals to have the same angle with the gradient. Where they point apart, the best share is
    outside [0, 1], which no average of the two keys can be, and norms do not see it."""
    case = Case(1, entries=40, line=True)
    before = case.output(*case.keys[:2])
    case.values[1] = before - 0.5 * (case.values[0] - before)
    before = case.output(*case.keys[:2])
    best = case.best(lambda key: (case.output(key, key) - before).square().sum())
    assert not -0.1 <= best <= 1.1
    assert 0 < float(KVSlimmer().share(case.pairs())) < 1


def test_shares_leave_the_segment_where_one_has_most_of_the_attention() -> None:
    case = Case(2, line=True)
    pairs = case.pairs()
    most, nothing = (
        Pairs(pairs.keys, pairs.values, tuple(torch.tensor(given).view(2, 1, 1)), pairs.output, None, pairs.real)
        for given in ((0.6, 0.01), (0.0, 0.0))
    )
    assert not 0 <= float(KVSlimmer().share(most)) <= 1
    assert KVSlimmer().share(nothing).isnan().all()


def asked(seed: int, queries: int = 100, entries: int = 9) -> Asked:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    bias = torch.where(torch.rand(2, queries, entries, generator=generator) < 0.2, -1e30, 0.0).double()
    real = (torch.rand(2, queries, 1, generator=generator) < 0.9).double()
    return Asked(draw(2, queries, DIM), draw(2, entries, DIM), draw(2, entries, DIM), bias, real, SCALE, block=64)


def test_gradients_are_the_papers() -> None:
    """Eq. 12, summed over queries, with E the layer's own output."""
    given = asked(0)
    weights = given.weights(given.keys)
    output = weights @ given.values
    residual = torch.einsum("lqd,led->lqe", output, given.values) - (output * output).sum(-1, keepdim=True)
    expected = SCALE * torch.einsum("lqe,lqd->led", weights * residual * given.real, given.query)
    torch.testing.assert_close(AsymKV().clues(given), expected.square().to(given.keys.dtype))


def test_exact_sensitivities_are_sums_over_queries() -> None:
    given, found = asked(1), KVSlimmerExact().clues(asked(1))
    weights = given.weights(given.keys)
    output = weights @ given.values
    for lane in range(2):
        for first in range(8):
            totals = torch.zeros(2, dtype=torch.float64)
            for query in range(100):
                a, b = weights[lane, query, first], weights[lane, query, first + 1]
                v, w = (given.values[lane, first + step] - output[lane, query] for step in (0, 1))
                gradient = output[lane, query] * given.real[lane, query]
                totals += torch.stack([gradient @ (a * (1 - 2 * a) * v), gradient @ (-a * b * (v + w))])
            torch.testing.assert_close(found[lane, first].double(), totals, atol=1e-4, rtol=1e-4)


def test_the_energys_gradient_is_the_output() -> None:
    output = torch.randn(3, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(energy(output), output)
    torch.testing.assert_close(gradient, output.detach())
