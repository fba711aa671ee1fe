"""Packed matrices: invalid scales, and inputs without rows. tests/native compares products."""

from __future__ import annotations

import pytest
import torch

from kvkeep.errors import ModelError
from kvkeep.models.packed import Blocks, PackedEmbedding, PackedLinear, quantised

pytestmark = pytest.mark.usefixtures("kernels")
WEIGHT = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7FFF, 0xFFFF])
def test_a_scale_that_is_no_number_is_refused(bits: int, scale: int) -> None:
    """The first two bytes of a block are its scale, a float16."""
    blocks = quantised(WEIGHT, bits)
    blocks.rows[39, 0], blocks.rows[39, 1] = scale & 255, scale >> 8
    with pytest.raises(ModelError, match=r"^A matrix of 40 x 64 weights .* is infinite or NaN: the file is damaged"):
        PackedLinear(Blocks(blocks.kind, blocks.rows))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_an_input_without_rows_gives_no_rows(bits: int) -> None:
    matrix = PackedLinear(quantised(WEIGHT, bits))
    assert matrix(torch.empty(1, 0, 64, dtype=torch.bfloat16)).shape == (1, 0, 40)
    assert PackedEmbedding(matrix)(torch.empty(1, 0, dtype=torch.int64)).shape == (1, 0, 64)
