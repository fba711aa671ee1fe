"""Products with packed weights: those of the codes, and a row's bits do not depend on other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.models import packed
from kvkeep.models.packed import Coded, PackedLinear

pytestmark = pytest.mark.usefixtures("kernels")


def made(bits: int, group: int, scales: torch.dtype, offsets: bool, outputs: int, inputs: int) -> Coded:
    """A random matrix of this form."""
    if bits == 16:
        return Coded(torch.randn(outputs, inputs).bfloat16(), 16)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    codes = torch.randint(low, high, (outputs, inputs)).to(dtype)
    scale = (torch.rand(outputs, inputs // group) / 16).to(scales)
    return Coded(codes, bits, scale, torch.randn(outputs, inputs // group).to(scales) / 2 if offsets else None)


def reference(x: Tensor, matrix: Coded, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in float64, and how far bfloat16 and sums in float32 may be from it."""
    weight = matrix.dense(torch.float64)
    wanted, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    if matrix.offsets is not None:  # which are added by group, and may cancel what codes add
        size += 16 * x.double().abs().sum(-1, keepdim=True)
    wanted = wanted if bias is None else wanted + bias.double()
    return wanted, wanted.abs() * 2**-8 + size * 2**-16


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8, 16]),
    group=st.sampled_from([16, 32]),
    scales=st.sampled_from([torch.float16, torch.float32]),
    offsets=st.booleans(),
    biased=st.booleans(),
    outputs=st.integers(1, 300),
    groups=st.integers(1, 6),
    rows=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_products_are_the_reference_and_rows_are_those_alone(
    bits: int,
    group: int,
    scales: torch.dtype,
    offsets: bool,
    biased: bool,
    outputs: int,
    groups: int,
    rows: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    matrix = made(bits, group, scales, offsets, outputs, group * groups)
    bias = torch.randn(outputs).bfloat16() if biased else None
    linear, x = PackedLinear(matrix, bias), torch.randn(rows, group * groups).bfloat16()
    found = linear(x)
    wanted, room = reference(x, matrix, bias)
    assert found.shape == (rows, outputs) and found.dtype == torch.bfloat16
    assert ((found.double() - wanted).abs() <= room).all()
    assert torch.equal(found, torch.cat([linear(row[None]) for row in x]))
    assert torch.equal(found, linear(x[:, None].expand(-1, 2, -1))[:, 1])  # twice as many, and not contiguous


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_without_kernels_products_are_as_near(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    matrix, bias, x = made(bits, 32, torch.float16, bits == 4, 45, 96), torch.randn(45), torch.randn(7, 96).bfloat16()
    linear = PackedLinear(matrix, bias)
    wanted = x.double() @ matrix.dense(torch.bfloat16).double().T + linear.bias.double()  # type: ignore[union-attr]
    monkeypatch.setattr(packed, "library", lambda: None)
    assert ((linear(x).double() - wanted).abs() <= wanted.abs() * 2**-8 + 0.02 * wanted.abs().mean()).all()
