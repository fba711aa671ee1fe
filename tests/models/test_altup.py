"""The residual streams of Gemma 3n are mixed as by transformers, and a token's bits depend on no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import saved
from families import tiny

from kvkeep.models.altup import Predict
from kvkeep.models.loading import load
from kvkeep.models.mlps import FusedMlp

pytestmark = pytest.mark.usefixtures("kernels")
X = torch.randn(4, 2, 9, 32, generator=torch.Generator().manual_seed(6)).bfloat16()
"""Streams, (streams, batch, tokens, hidden_size)."""


def layers(folder: Path) -> Any:
    return load(saved(tiny("gemma3n"), folder), weights="bfloat16", device="cpu").model.model.layers


@torch.no_grad()
def test_streams_are_mixed_as_by_the_module_and_token_by_token(tmp_path: Path) -> None:
    for layer in layers(tmp_path):
        assert isinstance(layer.altup.predict, Predict)
        precise, wanted = layer.altup.predict.mixed(X.float()), type(layer.altup).predict(layer.altup, X.float())
        assert (precise - wanted).abs().max() <= 1e-3 * (wanted - X.float()).abs().max()
        found = layer.altup.predict(X)
        for row in range(2):
            for token in range(9):
                alone = layer.altup.predict(X[:, row : row + 1, token : token + 1])
                assert torch.equal(alone, found[:, row : row + 1, token : token + 1])


def test_a_module_that_mixes_otherwise_keeps_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predict, "mixed", lambda self, x: x)
    assert not any("predict" in vars(layer.altup) for layer in layers(tmp_path))


def test_mlps_with_sparse_activations_run_by_their_modules(tmp_path: Path) -> None:
    """The library has no threshold that depends on all activations of a token."""
    fused = [isinstance(vars(layer.mlp).get("forward"), FusedMlp) for layer in layers(tmp_path)]
    assert fused == [False, False, True, True]


def test_other_activations_than_bfloat16_are_left_to_the_module(tmp_path: Path) -> None:
    altup = layers(tmp_path)[0].altup
    assert torch.equal(altup.predict(X.float()), type(altup).predict(altup, X.float()))
