"""Spectra are the weights' own, contributions add up to the cosine, and what is alike has a cosine of 1."""

from __future__ import annotations

import numpy
import pytest
import torch
from families import VOCABULARY
from kvkeep_lab.studies.spectra import SpectraStudy, contributed, modes
from measuring import measured

from kvkeep.errors import UnsupportedModelError

IDS = torch.randint(0, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(5))


def test_modes_are_numpy_s() -> None:
    weight = torch.randn(3, 6, 20, generator=torch.Generator().manual_seed(1))
    weight[1, 3:] = weight[1, :3]  # of rank 3
    values, vectors = modes(weight)
    expected = numpy.linalg.svd(weight.numpy().astype("float64"), compute_uv=False) ** 2
    assert numpy.allclose(values.numpy(), expected, rtol=1e-5, atol=1e-4)
    # In these coordinates the projections of any inputs have W W^T's eigenvalues as their energies.
    coordinates = weight.transpose(1, 2) @ vectors
    assert torch.allclose(coordinates.square().sum(1), values, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_contributions_are_equation_8() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(1, 6, 20, generator=generator).double(), torch.randn(9, 20, generator=generator).double()
    w = weight[0].T.numpy()  # the paper's: y = x W
    u, s, _ = numpy.linalg.svd(w, full_matrices=False)
    p = x.numpy() @ u
    got = contributed((x @ weight[0].T.double()) @ modes(weight)[1].double())[0]
    for t in range(8):
        norms = numpy.sqrt((s**2 * p[t] ** 2).sum() * (s**2 * p[t + 1] ** 2).sum())
        assert numpy.allclose(got[t].numpy(), s**2 * p[t] * p[t + 1] / norms, atol=1e-4)
        y, z = x[t].numpy() @ w, x[t + 1].numpy() @ w
        assert got[t].sum().item() == pytest.approx(y @ z / numpy.sqrt((y @ y) * (z @ z)), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "gemma4"])
def test_rows_add_up(family: str) -> None:
    told: list[int] = []
    found = measured(SpectraStudy(), family, IDS, progress=lambda what, done, total: told.append(done))
    assert told == [1, 2, 3, 4] and {row.layer for row in found.rows} == {0, 1, 2, 3}
    for row in found.rows:
        assert sum(row.eigenvalues) == pytest.approx(1, abs=1e-5)
        assert row.eigenvalues == sorted(row.eigenvalues, reverse=True)
        assert sum(row.contributions) == pytest.approx(row.cosine, abs=1e-4)
        assert len(row.head_cosines) == row.heads and 0 < row.modes <= 1
        assert abs(row.cosine) <= 1 and abs(row.apart) <= 1
        if row.projection == "value" and family in ("llama", "phi3"):  # neither bias nor rotation nor norm
            assert row.attended == pytest.approx(row.cosine, abs=1e-4)
    shared = [row.projection for row in found.rows if row.layer == 3]
    assert shared == (["query"] if family == "gemma4" else ["query", "key", "value"])


def test_identical_tokens_are_alike() -> None:
    found = measured(SpectraStudy(), ids=torch.full((1, 20), 7))
    for row in found.rows:
        assert row.cosine == pytest.approx(1, abs=1e-4) and row.apart == pytest.approx(1, abs=1e-4)
        if row.projection == "value":
            assert row.attended == pytest.approx(1, abs=1e-4)
        else:
            assert row.attended < 0.999  # rotated


def test_latent_attention_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="deepseek_v3"):
        measured(SpectraStudy(), "deepseek_v3", IDS)
