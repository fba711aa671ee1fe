"""Caps of scores: whatever attends, it takes the softmax of cap * tanh(score / cap)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvkeep.attention import Segment, attend, attend_scored, received
from kvkeep.step.scores import Scaling, cap_of, scores_of
from kvkeep.step.sinks import attend_beyond_sdpa

LANES, GROUPS, DIM, ENTRIES = 2, 3, 32, 80
SCALING = Scaling(0.5, 1.5)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def weights(query: Tensor, key: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The textbook's weights, and the log-sum-exp of scores, float64."""
    scores = 1.5 * (query.double() @ key.double().transpose(-1, -2) * 0.5 / 1.5).tanh()
    scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("queries", [1, 5])
def test_scores_are_capped_over_segments_and_for_what_entries_received(queries: int, dtype: torch.dtype) -> None:
    query = randn(LANES, GROUPS, queries, DIM, dtype=dtype)
    key, value = (randn(LANES, 1, ENTRIES + more, DIM, dtype=dtype)[:, :, more:] for more in (0, 1))
    old, new = slice(0, ENTRIES - queries), slice(ENTRIES - queries, ENTRIES)
    segments = [Segment(key[:, :, old], value[:, :, old]), Segment(key[:, :, new], value[:, :, new], causal=True)]
    seen = torch.arange(ENTRIES) <= torch.arange(ENTRIES - queries, ENTRIES)[:, None]
    wanted, wanted_lse = weights(query, key, seen)
    output, lse = attend(query, segments, SCALING)
    torch.testing.assert_close(output.double(), wanted @ value.double(), atol=NEAR[dtype], rtol=NEAR[dtype])
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=1e-4)
    found = received(query, segments[0], lse, SCALING)
    torch.testing.assert_close(found.double(), wanted.mean(1).sum(1)[:, old], atol=1e-4, rtol=1e-3)
    if queries == 1:
        output, parts = attend_scored(query, [Segment(key, value)], SCALING)
        torch.testing.assert_close(output.double(), wanted @ value.double(), atol=NEAR[dtype], rtol=NEAR[dtype])
        torch.testing.assert_close(parts[0].double(), wanted.mean(1).squeeze(1), atol=1e-4, rtol=1e-3)


def test_a_key_that_is_no_number_gets_no_weight() -> None:
    query, key, value = (randn(1, 1, count, DIM, dtype=torch.bfloat16) for count in (1, 40, 41))
    key[0, 0, 7] = float("nan")
    value = value[:, :, :40]
    seen = torch.arange(40) != 7
    found, _ = attend(query, [Segment(key, value)], SCALING)
    wanted, _ = weights(query, key.nan_to_num(), seen)
    torch.testing.assert_close(found.double(), wanted @ value.double(), atol=0.02, rtol=0.02)


def test_gradients_pass_a_cap() -> None:
    query, key = randn(1, 4, 3, DIM).requires_grad_(), randn(1, 2, 3, DIM)
    found = attend_beyond_sdpa(SimpleNamespace(), query, key, key, None, SCALING)
    assert found is not None
    seen = torch.ones(3, 3, dtype=torch.bool).tril()
    wanted, _ = weights(query, key.repeat_interleave(2, 1), seen)
    torch.testing.assert_close(found.double(), wanted @ key.repeat_interleave(2, 1).double(), atol=1e-5, rtol=1e-4)
    (ours,) = torch.autograd.grad(found.sum(), query)
    (theirs,) = torch.autograd.grad((wanted @ key.repeat_interleave(2, 1).double()).sum(), query)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_factor_without_a_cap_is_a_number() -> None:
    assert Scaling(0.5) == 0.5 and cap_of(Scaling(0.5)) == cap_of(0.5) == 0 and cap_of(SCALING) == 1.5


def test_a_multiple_gives_a_multiple_of_the_scores() -> None:
    products = randn(3, 40)
    found = scores_of(products.clone(), 2 * SCALING)
    torch.testing.assert_close(found, 2 * scores_of(products, SCALING))
