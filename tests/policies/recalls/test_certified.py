"""The choice of ``certified``: what it leaves out may have no more than the share, and it recalls little more."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.policies.recalls.certified import Certified


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 300),
    heads=st.integers(1, 3),
    share=st.sampled_from([1e-4, 0.01, 0.3, 0.9]),
    spread=st.sampled_from([0.0, 1.0, 5.0, 40.0]),
    level=st.sampled_from([-120.0, -8.0, 0.0, 200.0]),
    slack=st.sampled_from([0.0, 0.2, 3.0, 200.0, math.inf]),
    seed=st.integers(0, 10**6),
)
def test_the_others_have_at_most_the_share(
    count: int, heads: int, share: float, spread: float, level: float, slack: float, seed: int
) -> None:
    """Whatever the entries have within their bounds."""
    generator = torch.Generator().manual_seed(seed)
    excess = torch.randn(2, heads, 2, count, generator=generator) * spread + level
    excess.masked_fill_(torch.rand(2, 1, 1, count, generator=generator) < 0.2, float("-inf"))  # resident
    slacks = torch.full((2, heads, 2, 1), slack)
    chosen = Certified(share).choose(excess.clone(), slacks)

    def too_much(others: torch.Tensor) -> torch.Tensor:
        """Return which lanes leave too much out, with a thousandth for rounding, by logarithms."""
        most = excess.double()
        left = most.masked_fill(~others[:, None, None], -math.inf).logsumexp(3)
        kept = (most - slacks).masked_fill(others[:, None, None], -math.inf)
        rest = torch.nn.functional.pad(kept, (0, 1)).logsumexp(3)
        return (left - torch.logaddexp(left, rest)).exp().sub(share * 1.001).gt(0).any(2).any(1)

    assert not too_much(~chosen).any()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(share=st.sampled_from([1e-3, 0.01, 0.1]), spread=st.sampled_from([1.0, 3.0]), seed=st.integers(0, 10**6))
def test_few_more_than_necessary_are_recalled(share: float, spread: float, seed: int) -> None:
    """With exact scores, and one query."""
    excess = torch.randn(1, 1, 1, 1000, generator=torch.Generator().manual_seed(seed)) * spread
    weights = torch.nn.functional.pad(excess.flatten(), (0, 1)).softmax(0)[:-1].sort().values
    fewest = 1000 - int((weights.cumsum(0) <= share).sum())
    assert fewest - 1 <= int(Certified(share).choose(excess, torch.zeros(1, 1, 1, 1)).sum()) <= 1.1 * fewest + 10


def test_nothing_is_left_out_without_a_share() -> None:
    assert Certified(0.0).choose(torch.full((2, 1, 1, 5), -200.0), torch.zeros(2, 1, 1, 1)).all()
