"""attend() over any partition of the keys is attention over all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.attention import Segment, attend, received, weighed


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """The textbook: one softmax over all scores, in double precision."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
    scores = (query.double() @ key.transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~mask, float("-inf"))
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ value).to(query.dtype)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    queries=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 3]),
    value_dim=st.sampled_from([8, 5]),
    seed=st.integers(0, 10**6),
    masked=st.booleans(),
)
def test_any_partition(
    cuts: list[int], queries: int, kv_heads: int, groups: int, value_dim: int, seed: int, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    entries = sum(cuts)
    query = random(2, kv_heads * groups, queries, 8)
    key, value = random(2, kv_heads, entries, 8), random(2, kv_heads, entries, value_dim)
    mask = torch.ones(2, 1, queries, entries, dtype=torch.bool)
    if masked:
        mask = torch.rand(2, 1, queries, entries, generator=generator) > 0.5
    segments, start = [], 0
    for cut in cuts:
        span = slice(start, start + cut)
        segments.append(Segment(key[:, :, span], value[:, :, span], mask[..., span] if masked else None))
        start += cut
    torch.testing.assert_close(attend(query, iter(segments), 0.3)[0], dense(query, key, value, mask, 0.3))


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    key = torch.randn(1, 1, 4, 8)
    mask = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    mask[..., 0, :] = False
    output = attend(torch.randn(1, 1, 2, 8), [Segment(key, key, mask), Segment(key, key, mask)], 1.0)[0]
    assert (output[0, 0, 0] == 0).all()
    assert output.isfinite().all()
    both, seen = key.expand(2, -1, -1, -1), mask[0, 0][:, None, None]
    output, (weights,) = weighed(torch.randn(2, 1, 1, 8), [Segment(both, both, seen)], 1.0)
    assert not output[0].any() and not weights[0].any()
    torch.testing.assert_close(weights[1].sum(), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_combined_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 1, 8).to(dtype), torch.randn(1, 2, 64, 8).to(dtype)
    parts = [Segment(key[:, :, low : low + 4], key[:, :, low : low + 4]) for low in range(0, 64, 4)]
    output = attend(query, parts, 0.3)[0]
    assert output.dtype == dtype
    whole = dense(query.float(), key.float(), key.float(), torch.ones(1, 64, dtype=torch.bool), 0.3)
    torch.testing.assert_close(output.float(), whole, atol=1e-2, rtol=1e-2)


def test_nothing_to_attend_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        attend(torch.randn(1, 1, 1, 8), [], 1.0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_weighed_is_attend_with_its_weights(masked: bool, heads: int) -> None:
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, heads, 9, 8), torch.randn(3, heads, 9, 5)
    mask = (torch.rand(3, 1, 1, 9) > 0.4).index_fill(3, torch.tensor([0]), True) if masked else None
    segment = Segment(key, value, mask)
    output, (weights,) = weighed(query, [segment], 0.3)
    expected, lse = attend(query, [segment], 0.3)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, received(query, segment, lse, 0.3))
    other = Segment(torch.randn(3, 1, 4, 8), torch.randn(3, 1, 4, 5), torch.rand(3, 1, 1, 4) > 0.5)
    for reduce in ("sum", "max"):
        output, shares = weighed(query, [segment, other], 0.3, reduce)
        expected, lse = attend(query, [segment, other], 0.3)
        torch.testing.assert_close(output, expected)
        for share, part in zip(shares, (segment, other), strict=True):
            torch.testing.assert_close(share, received(query, part, lse, 0.3, reduce=reduce))
