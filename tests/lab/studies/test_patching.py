"""KV-Direct's Eq. 10: what keys and values say beyond the residuals of one layer."""

from __future__ import annotations

import math

import pytest
import torch
from kvkeep_lab.studies.patching import AFTER, PatchingStudy, divergence_bits
from measuring import measured


def twin(a: list[float], b: list[float]) -> float:
    """I(which; token), token by token: both as likely."""
    bits = 0.0
    for p, q in zip(a, b, strict=True):
        for one in (p, q):
            bits += one / 2 * math.log2(one / ((p + q) / 2)) if one else 0.0
    return bits


def test_divergence_bits_equal_the_mutual_information() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 5, 7, generator=draw, dtype=torch.float64).softmax(-1)
    a[0], b[0] = torch.eye(7, dtype=torch.float64)[:2]  # nothing in common: one bit
    b[1] = a[1]
    bits = divergence_bits(a.log(), b.log())
    assert bits.tolist() == pytest.approx([twin(p, q) for p, q in zip(a.tolist(), b.tolist(), strict=True)], abs=1e-12)
    assert bits[0] == pytest.approx(1) and bits[1] == 0 and (bits[2:] > 0).all()


def test_residuals_of_one_layer_determine_the_next_token_only() -> None:
    """Earlier layers hold entries of another prompt, and later tokens attend to them."""
    study = PatchingStudy()
    found = measured(study)
    assert AFTER > 1 and [row.layer for row in found.rows] == list(range(len(found.rows)))
    assert all(row.information == 0 for row in found.rows)
    assert found.rows[0].later == 0 and all(row.later > 0 for row in found.rows[1:])
    scores = study.scores(found)
    assert scores["information"] == 0 and scores["later"] == max(row.later for row in found.rows)


def test_results_of_earlier_versions_are_read() -> None:
    study = PatchingStudy()
    old = study.restored({"rows": [{"layer": 0, "kl": 0.0, "also_reads": ""}]})
    assert set(study.scores(old)) == {"kl", "layers"} and "-" in study.tables(old)[0].rows[0]
