"""Sums and interpolations in a fixed order, each operation rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.attention.portable import interpolated, summed


@given(count=st.integers(0, 40), seed=st.integers(0, 99))
def test_a_sum_is_the_tree_that_numpy_adds(count: int, seed: int) -> None:
    numbers = torch.randn(3, count, 2, generator=torch.Generator().manual_seed(seed))
    rest = [numbers[:, number].numpy() for number in range(count)]
    while len(rest) > 1:
        half = len(rest) // 2
        pairs = zip(rest[:half], rest[half : 2 * half], strict=True)
        rest = [np.add(low, high, dtype=np.float32) for low, high in pairs] + rest[2 * half :]
    found = summed(numbers, 1)
    assert found.shape == (3, 1, 2)
    assert np.array_equal(found[:, 0].numpy(), rest[0] if rest else np.zeros((3, 2), np.float32))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_interpolation(share: float) -> None:
    first, second = torch.randn(2, 50).unbind()
    wanted = torch.lerp(first.double(), second.double(), share)
    for given_share in (share, torch.full_like(first, share)):
        found = interpolated(first, second, given_share)
        torch.testing.assert_close(found.double(), wanted)
        if share in (0.0, 1.0):
            assert torch.equal(found, (first, second)[int(share)])
