"""The closed form of sensitivities, against autograd and brute force."""

from __future__ import annotations

import pytest
import torch
from kvkeep_lab.sensitivity import sensitivity
from torch import Tensor


def case(seed: int, tokens: int = 6, dim: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A query, keys, values, and a gradient from outside."""
    generator = torch.Generator().manual_seed(seed)
    query, keys, values, external = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((dim,), (tokens, dim), (tokens, dim + 2), (dim + 2,))
    )
    return query, keys, values, external


def attended(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    weights = (keys @ query / len(query) ** 0.5).softmax(0)
    return weights, weights @ values


@pytest.mark.parametrize("seed", range(4))
def test_hessian_blocks_equal_autograd(seed: int) -> None:
    query, keys, values, external = case(seed)
    weights, output = attended(query, keys, values)
    hessian = torch.autograd.functional.hessian(lambda k: attended(query, k, values)[1] @ external, keys)
    found = sensitivity(external[None], weights[None], values, output[None])
    outer = torch.outer(query, query) / len(query)
    for pair in range(len(keys) - 1):
        for g, (i, j) in ((found.g11, (0, 0)), (found.g12, (0, 1)), (found.g22, (1, 1))):
            assert torch.allclose(hessian[pair + i, :, pair + j], g[0, pair] * outer, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_norms_and_cosines_equal_those_of_the_written_out_vectors(seed: int) -> None:
    """Eqs. 23-25."""
    query, keys, values, external = case(seed, tokens=9)
    values = values + 100  # what all values have in common is in no residual
    weights, output = attended(query, keys, values)
    found = sensitivity(external[None], weights[None], values, output[None])
    for m in range(8):
        a, b, r, s = weights[m], weights[m + 1], values[m] - output, values[m + 1] - output
        vectors = (a * (1 - 2 * a) * r, -a * b * (r + s), b * (1 - 2 * b) * s)
        norms = (found.norm11, found.norm12, found.norm22)
        for vector, norm, cosine in zip(vectors, norms, found.cosines, strict=True):
            assert norm[0, m].item() == pytest.approx(vector.norm().item(), rel=1e-7)
            assert cosine[0, m].item() == pytest.approx(torch.cosine_similarity(vector, external, 0).item(), abs=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_weight_makes_the_expansion_stationary(seed: int) -> None:
    """The second-order loss of moving both keys to w k_m + (1 - w) k_m+1, as in Eq. 2 without the gradient's own term,
    has slope 0 there."""
    query, keys, values, external = case(seed)
    weights, output = attended(query, keys, values)
    found = sensitivity(external[None], weights[None], values, output[None])
    hessian = torch.autograd.functional.hessian(lambda k: attended(query, k, values)[1] @ external, keys)
    for m in range(len(keys) - 1):
        weight = found.exact_weight[0, m].clone().requires_grad_()
        merged = weight * keys[m] + (1 - weight) * keys[m + 1]
        first, second = merged - keys[m], merged - keys[m + 1]
        loss = (
            first @ hessian[m, :, m] @ first
            + 2 * first @ hessian[m, :, m + 1] @ second
            + second @ hessian[m + 1, :, m + 1] @ second
        )
        (slope,) = torch.autograd.grad(loss, weight)
        assert slope.item() == pytest.approx(0, abs=1e-9)


def test_the_closed_weight_is_exact_if_equation_32_holds() -> None:
    """Values lie on one line and the query is far from both keys, so that residuals are parallel."""
    query, keys, _, external = case(1)
    direction = torch.randn(7, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    values = torch.zeros(6, 1, dtype=torch.float64) * direction
    values[2:4] = torch.tensor([[1.0], [3.0]], dtype=torch.float64) * direction
    keys[2:4] -= 3 * query  # little attention
    weights, output = attended(query, keys, values)
    found = sensitivity(external[None], weights[None], values, output[None])
    cos11, cos12, cos22 = (float(cosine[0, 2]) for cosine in found.cosines)
    assert cos11 == pytest.approx(cos22) and cos11 == pytest.approx(-cos12)
    assert float(found.closed_weight[0, 2]) == pytest.approx(float(found.exact_weight[0, 2]))
