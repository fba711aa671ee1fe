"""Bounds on scores: what is kept step by step is what is computed at once, and no score is above its bound."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep_lab.published.page_bounds import PAGE, Bounds


def keys(count: int, seed: int, lanes: int = 6, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(lanes, count, 5, generator=torch.Generator().manual_seed(seed)) * scale


def recomputed(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page by page, from all keys."""
    pages = [whole[:, low : low + PAGE] for low in range(0, whole.shape[1], PAGE)]
    return torch.stack([page.amin(1) for page in pages], 1), torch.stack([page.amax(1) for page in pages], 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chunks=st.lists(st.integers(1, 80), min_size=1, max_size=9), seed=st.integers(0, 10**6))
def test_step_by_step_is_all_at_once(chunks: list[int], seed: int) -> None:
    whole, bounds = keys(sum(chunks), seed), Bounds()
    for low, count in zip([sum(chunks[:number]) for number in range(len(chunks))], chunks, strict=True):
        bounds.extend(whole[:, low : low + count])
        low_now, high_now = recomputed(whole[:, : low + count])
        assert bounds.length == low + count and bounds.pages == low_now.shape[1]
        assert (bounds.low == low_now).all() and (bounds.high == high_now).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 100),
    gone=st.integers(0, 99),
    more=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_no_score_is_above_its_bound(count: int, gone: int, more: int, seed: int, scale: float) -> None:
    """Also after a part was cut off and others came: the bound may be too wide, never too narrow."""
    bounds, kept = Bounds(), max(1, count - gone)
    first, rest = keys(count, seed, scale=scale), keys(more, seed + 1, scale=scale)
    bounds.extend(first)
    bounds.truncate(kept)
    assert bounds.pages == -(-kept // PAGE)
    bounds.extend(rest)
    index = torch.tensor([1, 0, 5, 1, 3])
    bounds.select(index)
    whole = torch.cat([first[:, :kept], rest], 1)[index]
    query = torch.randn(5, 2, 4, 5, generator=torch.Generator().manual_seed(seed + 2))
    upper = bounds.upper(query).repeat_interleave(PAGE, 3)[..., : whole.shape[1]]
    scores = torch.einsum("lhqd,lsd->lhqs", query, whole)
    assert (scores <= upper + 1e-5 * upper.abs().clamp(min=scale)).all()
    again = Bounds()
    again.restore(bounds.state(), bounds.length)
    assert (again.upper(query) == bounds.upper(query)).all()


def test_a_page_of_one_key_is_bounded_by_its_score() -> None:
    bounds, whole = Bounds(), keys(PAGE + 1, 0)
    bounds.extend(whole)
    query = torch.randn(6, 1, 1, 5)
    torch.testing.assert_close(bounds.upper(query)[..., -1], torch.einsum("lhqd,ld->lhq", query, whole[:, -1]))


def test_bytes_are_those_of_its_tensors() -> None:
    bounds = Bounds()
    assert bounds.nbytes == 0 and bounds.state() == {}
    bounds.extend(keys(33, 0))
    assert bounds.nbytes == 2 * 6 * 8 * 5 * 4  # low and high, lanes, a block of pages, channels, floats
