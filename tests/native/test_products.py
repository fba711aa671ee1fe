"""Products with packed weights: accuracy, and bits of a row that do not depend on other rows."""

from __future__ import annotations

import pytest
import torch
from gguf_files import SCALES, set_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.errors import BadCall
from kvkeep.models import packed
from kvkeep.models.packed import KINDS, Blocks, Packed, PackedLinear, multiplied
from kvkeep.native.library import kernels
from kvkeep.native.structures import KIND_NUMBERS, KvMatrix, address_of, array

pytestmark = pytest.mark.usefixtures("kernels")


def made(kind: str, outputs: int, blocks: int) -> Blocks:
    """A random matrix of a kind, with scales that are neither huge nor tiny."""
    about = KINDS[kind]
    if kind == "BF16":
        return Blocks(kind, torch.randn(outputs, 32 * blocks).bfloat16().view(torch.uint8))
    if kind == "F16":
        return Blocks(kind, torch.randn(outputs, 32 * blocks).half().view(torch.uint8))
    if kind == "F32":
        return Blocks(kind, torch.randn(outputs, 32 * blocks).view(torch.uint8))
    rows = torch.randint(0, 256, (outputs, blocks, about.size)).to(torch.uint8)
    if kind == "MXFP4":
        rows[..., 0] = 122 + rows[..., 0] % 4
        return Blocks(kind, rows.flatten(1))
    scales = (torch.rand(outputs * blocks, len(SCALES.get(kind, (0,)))) / 16 + 0.01).half()
    set_scales(kind, rows.view(-1, about.size).numpy(), scales.numpy())
    return Blocks(kind, rows.flatten(1))


def rounded(x: Tensor) -> Tensor:
    """Inputs as products take them: 8 bits by groups of 32, in float64."""
    groups = x.float().unflatten(1, (-1, 32))
    greatest = groups.abs().amax(-1, keepdim=True)
    codes = (groups * torch.full_like(greatest, 127).div(greatest)).round()
    return (codes.double() * (greatest / 127).double()).flatten(1)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*KINDS]),
    biased=st.booleans(),
    outputs=st.integers(1, 300),
    blocks=st.integers(1, 4),
    rows=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_products_equal_the_reference_and_rows_are_independent(
    kind: str, biased: bool, outputs: int, blocks: int, rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    matrix, bias = made(kind, outputs, blocks), torch.randn(outputs).bfloat16() if biased else None
    inputs = matrix.shape[1]
    linear, x = PackedLinear(matrix, bias), torch.randn(rows, inputs).bfloat16()
    weight, read = matrix.dense().double(), x.double() if kind in ("BF16", "F16", "F32") else rounded(x)
    wanted, size = read @ weight.T, read.abs() @ weight.abs().T
    wanted = wanted if bias is None else wanted + bias.double()
    found = linear(x)
    assert found.shape == (rows, outputs) and found.dtype == torch.bfloat16
    # Scale and offset of a group are added apart, and may cancel each other.
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + size * 2**-14).all()
    assert torch.equal(found, torch.cat([linear(row[None]) for row in x]))
    assert torch.equal(found, linear(x[:, None].expand(-1, 2, -1))[:, 1])  # twice as many, and not contiguous


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("IQ")])
def test_rows_that_share_the_codes_of_a_unit_are_independent(kind: str) -> None:
    """Codes of a codebook are looked up for 512 rows at a time; the last tile here has 5."""
    torch.manual_seed(0)
    linear = PackedLinear(made(kind, 40, 512 // KINDS[kind].elements))
    x = torch.randn(16 * 33 + 5, 512).bfloat16()
    assert torch.equal(linear(x), torch.cat([linear(rows) for rows in x.split(7)]))


@settings(max_examples=20, deadline=None)
@given(outputs=st.integers(1, 70), inputs=st.integers(1, 99), rows=st.integers(1, 50), seed=st.integers(0, 99))
def test_products_in_float32_are_a_chain_in_the_order_of_inputs(
    outputs: int, inputs: int, rows: int, seed: int
) -> None:
    """Products of two float32 are exact in float64, and so nearly is each sum before it is rounded."""
    torch.manual_seed(seed)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    linear = Packed(Blocks("F32", weight.view(torch.uint8)))
    wanted = torch.zeros(rows, outputs)
    for i in range(inputs):
        wanted = torch.addcmul(wanted.double(), x[:, i : i + 1].double(), weight[:, i].double()).float()
    found = multiplied(linear, x, bias)
    assert found.dtype == torch.float32 and torch.equal(found, wanted + bias)
    assert torch.equal(found, torch.cat([multiplied(linear, row[None], bias) for row in x]))


def test_rows_of_extreme_inputs_are_independent() -> None:
    """Zeros, tiny and huge numbers, and the largest possible sums."""
    torch.manual_seed(0)
    x = torch.randn(19, 256).bfloat16()
    x[3], x[4], x[5], x[6, :32], x[7] = 0, 1e-36, 3e30, 1e-30, 127
    for kind in KINDS:
        linear = PackedLinear(made(kind, 40, 8 if KINDS[kind].elements < 256 else 1))
        found = linear(x)
        assert torch.isfinite(found).all() and torch.equal(found, torch.cat([linear(row[None]) for row in x]))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "BF16"])
def test_products_of_torch_are_equally_accurate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    matrix, bias, x = made(kind, 45, 3), torch.randn(45), torch.randn(7, 96).bfloat16()
    monkeypatch.setattr(packed, "library", lambda: None)
    linear = PackedLinear(matrix, bias)
    assert not linear.native
    wanted = x.double() @ matrix.dense(torch.bfloat16).double().T + linear.bias.double()  # type: ignore[union-attr]
    assert ((linear(x).double() - wanted).abs() <= wanted.abs() * 2**-8 + 0.02 * wanted.abs().mean()).all()


def test_packed_sizes_equal_those_of_the_library() -> None:
    assert {*KINDS} == {*KIND_NUMBERS}
    for name, kind in KINDS.items():
        assert kernels().kvkeep_packed_bytes(KIND_NUMBERS[name], kind.elements, 16) == 16 * kind.packed
        assert not kernels().kvkeep_packed_bytes(KIND_NUMBERS[name], kind.elements - 1, 16)


def test_a_matrix_of_no_kind_is_neither_packed_nor_read() -> None:
    data, out = torch.zeros(4096, dtype=torch.uint8), torch.full((16, 64), 7.0)
    for number in (-1, len(KIND_NUMBERS), 1 << 40):
        matrix, index = KvMatrix(array(data), 64, 16, number), torch.zeros(1, dtype=torch.int64)
        assert not kernels().kvkeep_packed_bytes(number, 64, 16)
        with pytest.raises(BadCall, match="of a kind"):
            kernels().kvkeep_pack(number, 64, 16, data, 64, data)
        with pytest.raises(BadCall, match="of a kind"):
            kernels().kvkeep_unpack(address_of(matrix), data, 64)
        with pytest.raises(BadCall, match="of a kind"):
            kernels().kvkeep_rows(address_of(matrix), index, out)
    assert (out == 7).all() and not data.any()
