"""Blocks of GGUF files: dequantised values equal those of the gguf package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import SCALES, set_scales

from kvkeep.errors import ModelError
from kvkeep.models.packed import KINDS, Blocks, Packed, quantised

STORED = [kind for kind in KINDS if kind != "BF16"]


def random_rows(kind: str, count: int = 24, blocks: int = 3) -> np.ndarray:
    """Random bytes: every code, scale and offset comes up. Halves that are not finite are made so."""
    about = KINDS[kind]
    rows = np.random.default_rng(3).integers(0, 256, (count, blocks * about.size), dtype=np.uint8)
    halves = {"F16": [1, 3], "IQ1_M": [55]}.get(kind) or [place + 1 for place in SCALES.get(kind, (0,))]
    rows.reshape(-1, about.size)[:, halves] &= 0xBF  # exponents below 16
    if kind == "F32":
        return np.random.default_rng(3).standard_normal((count, blocks), np.float32).view(np.uint8)
    if kind == "MXFP4":
        rows.reshape(-1, about.size)[:, 0] %= 250  # the last ones are not finite
    return rows


@pytest.mark.parametrize("kind", STORED)
def test_dense_weights_equal_ggufs_dequantisation(kind: str) -> None:
    about, theirs = KINDS[kind], GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[theirs]
    assert about.size * elements == size * about.elements and about.elements % elements == 0
    rows = random_rows(kind)
    made, expected = Blocks(kind, torch.from_numpy(rows)), torch.from_numpy(dequantize(rows, theirs))
    assert made.shape == expected.shape
    assert bool(expected.isfinite().all()) and float(expected.std()) > 0
    assert torch.equal(made.dense(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_panels_keep_every_bit(kind: str, kernels: None) -> None:
    """Memory of complete panels is at most 1.03 of the file's. The rows have each of 2048 entries of a codebook some 16
    times."""
    about = KINDS[kind]
    rows = random_rows(kind, 512, 2) if kind != "BF16" else torch.randn(512, 64).bfloat16().view(torch.uint8).numpy()
    for count in (512, 37, 1):
        blocks = Blocks(kind, torch.from_numpy(rows[:count].copy()))
        packed = Packed(blocks)
        assert packed.native and torch.equal(packed.blocks().rows, blocks.rows)
        index = torch.arange(count).flip(0)
        assert torch.equal(packed.rows(index), blocks.dense()[index])
        if count % 16 == 0:
            assert packed.data.nbytes == count * rows.shape[1] // about.size * about.packed <= 1.03 * blocks.rows.nbytes


@pytest.mark.parametrize("kind", [kind for kind in STORED if kind not in ("F16", "F32", "MXFP4")])
def test_a_block_with_an_infinite_scale_is_refused(kind: str, kernels: None) -> None:
    rows = random_rows(kind)
    set_scales(kind, rows.reshape(-1, KINDS[kind].size)[7:8], np.array(np.inf, np.float16))
    with pytest.raises(ModelError, match=rf"\({kind}\) has a scale that is infinite or NaN: the file is damaged"):
        Packed(Blocks(kind, torch.from_numpy(rows)))


@pytest.mark.parametrize(
    ("bits", "weight", "sentence"),
    [
        (8, 9e6, "has a weight of 9e\\+06, and weights of 8 bits reach 8.319e\\+06: .* --weights bfloat16"),
        (4, -7e4, "has a weight of 7e\\+04, and weights of 4 bits reach 6.55e\\+04: .* --weights bfloat16"),
        (8, float("nan"), "infinite or NaN: the file is damaged"),
        (4, float("-inf"), "infinite or NaN: the file is damaged"),
    ],
)
def test_a_weight_beyond_the_range_of_scales_is_refused(bits: int, weight: float, sentence: str) -> None:
    rows = torch.randn(3, 64)
    rows[1, 40] = weight
    with pytest.raises(ModelError, match=sentence):
        quantised(rows, bits)


@pytest.mark.parametrize(("bits", "greatest"), [(8, 8.3e6), (4, 65500.0)])
def test_the_largest_weights_have_finite_scales(bits: int, greatest: float) -> None:
    rows = torch.linspace(-greatest, greatest, 64).view(2, 32)
    assert (quantised(rows, bits).dense() - rows).abs().max() < greatest / (8 if bits == 4 else 100)


@pytest.mark.parametrize(("bits", "furthest"), [(4, 0.55 / 15), (8, 0.51 / 127), (16, 2**-8)])
def test_quantised_weights_are_near_the_originals(bits: int, furthest: float) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    groups = weight.unflatten(1, (-1, 32))
    size = groups.amax(-1) - groups.amin(-1) if bits == 4 else groups.abs().amax(-1)
    apart = (quantised(weight, bits).dense() - weight).unflatten(1, (-1, 32)).abs().amax(-1)
    assert bool((apart <= furthest * size + 2e-3).all())
