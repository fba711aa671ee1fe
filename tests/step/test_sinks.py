"""Sinks: scores of each head that take a share of the softmax and bring no value."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.step.scores import Scaling
from kvkeep.step.sinks import attend_beyond_sdpa, sinks_of

HEADS, KV_HEADS, DIM, SCALING = 4, 2, 8, 0.3


def module(sinks: bool = True) -> SimpleNamespace:
    made = torch.randn(HEADS, generator=torch.Generator().manual_seed(1)) * 2
    return SimpleNamespace(sinks=made if sinks else None)


def expected(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """The textbook: a column more of scores, which brings no value. seen: (batch or 1, 1, queries, entries)."""
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1).double() for part in (key, value))
    scores = (query.double() @ key.transpose(-1, -2) * SCALING).masked_fill(~seen, float("-inf"))
    column = module().sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("queries", [1, 3, 9])
def test_attention_over_all_entries(queries: int) -> None:
    query, key = torch.randn(2, HEADS, queries, DIM), torch.randn(2, KV_HEADS, 9, DIM)
    value = torch.randn(2, KV_HEADS, 9, 5)
    causal = (torch.arange(9) <= torch.arange(9 - queries, 9)[:, None])[None, None]
    given = torch.rand(2, 1, queries, 9) > 0.4
    for mask, seen in ((None, causal), (given, given)):
        found = attend_beyond_sdpa(module(), query, key, value, mask, SCALING)
        assert found is not None
        torch.testing.assert_close(found.double(), expected(query, key, value, seen), atol=1e-5, rtol=1e-4)
    assert attend_beyond_sdpa(module(sinks=False), query, key, value, None, SCALING) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_queries_over_banks_of_a_part_of_the_lanes(dtype: torch.dtype) -> None:
    """Each bank is merged into what its lanes have so far, for every query by itself."""
    queries, sizes = 5, ((0, 1, 2, 3), (0, 2), (1, 3), (3,))
    query = torch.randn(2, HEADS, queries, DIM).to(dtype)
    lanes = query.reshape(2 * KV_HEADS, HEADS // KV_HEADS, queries, DIM)
    parts = [torch.randn(len(rows), 1, 4 + number, DIM).to(dtype) for number, rows in enumerate(sizes)]
    segments = [
        Segment(part, part, lanes=None if len(rows) == 4 else torch.tensor(rows))
        for part, rows in zip(parts, sizes, strict=True)
    ]
    found, _ = attend(lanes, segments, SCALING, sinks_of(module()))
    for lane in range(4):
        rows = [part[list(of).index(lane)][None] for part, of in zip(parts, sizes, strict=True) if lane in of]
        key = torch.cat(rows, 2).expand(-1, KV_HEADS, -1, -1)
        group = slice(lane % KV_HEADS * 2, lane % KV_HEADS * 2 + 2)
        whole = expected(query[lane // KV_HEADS][None], key, key, torch.ones(1, 1, 1, 1, dtype=torch.bool))
        near = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(found[lane].double(), whole[0, group], atol=near, rtol=near)


def test_sinks_learn() -> None:
    made = module()
    made.sinks.requires_grad_()
    query, key = torch.randn(1, HEADS, 3, DIM), torch.randn(1, KV_HEADS, 3, DIM)
    found = attend_beyond_sdpa(made, query, key, key, None, SCALING)
    assert found is not None
    found.sum().backward()
    assert made.sinks.grad is not None and float(made.sinks.grad.abs().min()) > 0


@pytest.mark.parametrize("additive", [False, True])
def test_a_query_that_sees_nothing_leaves_the_gradients_of_others(additive: bool) -> None:
    """Of capped scores, in a batch with padding."""
    query, key = torch.randn(1, HEADS, 3, DIM), torch.randn(1, KV_HEADS, 3, DIM)
    seen = torch.tensor([[False, False, False], [False, True, False], [False, True, True]])[None, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")) if additive else seen
    gradients = []
    for first in (0, 1):  # with the query, and without it and the entry that nobody sees
        given = [part[:, :, first:].clone().requires_grad_() for part in (query, key)]
        found = attend_beyond_sdpa(
            module(sinks=False), given[0], given[1], given[1], mask[..., first:, first:], Scaling(SCALING, 2.0)
        )
        assert found is not None
        found[:, :, 1 - first :].square().sum().backward()
        gradients.append([part.grad[:, :, 1 - first :] for part in given if part.grad is not None])
    torch.testing.assert_close(*gradients)
