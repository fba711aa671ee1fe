"""Blocks of GGUF files: the codes' values are those that gguf itself dequantises, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvkeep.models.blocks import KINDS, coded


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_blocks_exactly(kind: str) -> None:
    """Random bytes: every code, scale and offset comes up. Halves that are not finite are made so."""
    about, theirs = KINDS[kind], GGMLQuantizationType[kind]
    assert GGML_QUANT_SIZES[theirs] == (about.elements, about.size)
    generator = np.random.default_rng(3)
    rows = generator.integers(0, 256, (24, 3 * about.size), dtype=np.uint8)
    blocks = rows.reshape(-1, about.size)
    blocks[:, [1, 3, 209 % about.size]] &= 0xBF  # exponents below 16: the halves of some kinds lie here
    made = coded(kind, rows)
    assert (made.codes.shape, made.bits, made.group) == ((24, 3 * about.elements), about.bits, about.group)
    assert made.codes.dtype == (torch.uint8 if about.bits == 4 else torch.int8)
    expected = torch.from_numpy(dequantize(rows, theirs))
    assert bool(expected.isfinite().all()) and float(expected.std()) > 0
    assert torch.equal(made.dense(), expected)
