"""Formulas of merging by the last queries, against automatic differentiation and loops, in float64."""

from __future__ import annotations

import torch
from kvkeep_lab.published.asymkv import AsymKV, energy
from kvkeep_lab.published.by_queries import Queries
from kvkeep_lab.published.kvslimmer_exact import KVSlimmerExact

DIM, SCALE = 4, 0.5  # 1 / sqrt(DIM)


def random_queries(seed: int, queries: int = 100, entries: int = 9) -> Queries:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    bias = torch.where(torch.rand(2, queries, entries, generator=generator) < 0.2, -1e30, 0.0).double()
    real = (torch.rand(2, queries, 1, generator=generator) < 0.9).double()
    return Queries(draw(2, queries, DIM), draw(2, entries, DIM), draw(2, entries, DIM), bias, real, SCALE, block=64)


def test_asymkv_gradients_follow_equation_12() -> None:
    """Eq. 12, summed over queries, with E the layer's own output."""
    given = random_queries(0)
    weights = given.weights(given.keys)
    output = weights @ given.values
    residual = torch.einsum("lqd,led->lqe", output, given.values) - (output * output).sum(-1, keepdim=True)
    expected = SCALE * torch.einsum("lqe,lqd->led", weights * residual * given.real, given.query)
    torch.testing.assert_close(AsymKV().clues(given), expected.square().to(given.keys.dtype))


def test_exact_sensitivities_are_sums_over_all_queries() -> None:
    given, found = random_queries(1), KVSlimmerExact().clues(random_queries(1))
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


def test_the_gradient_of_the_energy_is_the_output() -> None:
    output = torch.randn(3, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(energy(output), output)
    torch.testing.assert_close(gradient, output.detach())
