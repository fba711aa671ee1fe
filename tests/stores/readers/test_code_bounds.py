"""Bounds by codes: what is kept step by step is what is computed at once, and no score is above its bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.stores.readers.code_bounds import CodeBounds, code_bounds_bytes

DIM = 6


def keys(count: int, seed: int, lanes: int = 6, scale: float = 3.0) -> torch.Tensor:
    """Keys with an offset in each channel, as those of models with biases."""
    drawn = torch.randn(lanes, count + 1, DIM, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn[:, 1:] + 20 * drawn[:, :1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(chunks=st.lists(st.integers(1, 80), min_size=1, max_size=9), seed=st.integers(0, 10**6))
def test_step_by_step_is_all_at_once(chunks: list[int], seed: int) -> None:
    whole, bounds, once = keys(sum(chunks), seed), CodeBounds(4), CodeBounds(4)
    once.extend(whole)
    for part in whole.split(chunks, 1):
        bounds.extend(part)
        assert bounds.nbytes <= code_bounds_bytes(6, DIM, 4, whole.shape[1])
    assert bounds.length == bounds.pages == whole.shape[1]
    assert bounds.state().keys() == once.state().keys()
    assert all((part == once.state()[name]).all() for name, part in bounds.state().items())
    bounds.check(Extent(6, whole.shape[1], DIM, DIM))
    with pytest.raises(ShapeError):
        bounds.check(Extent(6, whole.shape[1] + 1, DIM, DIM))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    bits=st.sampled_from([2, 4, 8]),
    count=st.integers(1, 100),
    gone=st.integers(0, 99),
    more=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_no_score_is_above_its_bound(bits: int, count: int, gone: int, more: int, seed: int, scale: float) -> None:
    """Also after a part was cut off, which decodes the codes of a group, and others came."""
    bounds, kept = CodeBounds(bits), max(1, count - gone)
    first, rest = keys(count, seed, scale=scale), keys(more, seed + 1, scale=scale)
    bounds.extend(first)
    bounds.truncate(kept)
    assert bounds.pages == kept
    bounds.extend(rest)
    index = torch.tensor([1, 0, 5, 1, 3])
    bounds.select(index)
    whole = torch.cat([first[:, :kept], rest], 1)[index]
    query = torch.randn(5, 2, 4, DIM, generator=torch.Generator().manual_seed(seed + 2))
    upper, scores = bounds.upper(query), torch.einsum("lhqd,lsd->lhqs", query, whole)
    rounding = 1e-5 * torch.einsum("lhqd,lsd->lhqs", query.abs(), whole.abs())
    assert (scores <= upper + rounding).all()
    again = CodeBounds(bits)
    again.restore(bounds.state(), bounds.length)
    assert (again.upper(query) == bounds.upper(query)).all()


def test_more_bits_bound_closer() -> None:
    whole, query, excess = keys(96, 0), torch.randn(6, 1, 1, DIM), []
    for bits in (2, 4, 8):
        bounds = CodeBounds(bits)
        bounds.extend(whole)
        excess.append(float((bounds.upper(query) - torch.einsum("lhqd,lsd->lhqs", query, whole)).mean()))
    assert excess[0] > 3 * excess[1] > 20 * excess[2] > 0


def test_keys_behind_the_last_group_have_their_scores() -> None:
    bounds, whole, query = CodeBounds(2), keys(40, 0), torch.randn(6, 1, 1, DIM)
    bounds.extend(whole)
    scores = torch.einsum("lhqd,lsd->lhqs", query, whole)
    torch.testing.assert_close(bounds.upper(query)[..., 32:], scores[..., 32:])
    full = CodeBounds(4)
    full.extend(keys(63, 0))
    assert full.nbytes == code_bounds_bytes(6, DIM, 4, 63)
    place = full.state()["bounds.keys"].data_ptr()
    for _ in range(40):  # a key moves once, into a group
        full.extend(keys(1, 0))
        assert full.length % 32 == 0 or full.state()["bounds.keys"].data_ptr() == place
    assert CodeBounds(2).state() == {} and CodeBounds(2).nbytes == 0
