"""Routers of experts: the values of torch, and no token goes elsewhere in a larger batch."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import saved
from helpers import padded, prompt, step
from mixtures import mixture
from torch.nn import functional

from kvkeep import KeepCache
from kvkeep.models.loading import load
from kvkeep.models.packed import PackedLinear
from kvkeep.models.routers import RouterWeight

pytestmark = pytest.mark.usefixtures("kernels")


def weight(experts: int = 8, hidden: int = 64) -> RouterWeight:
    made = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    return RouterWeight(made, requires_grad=False)


def test_products_are_those_of_torch_and_of_single_rows() -> None:
    made, x = weight(), torch.randn(33, 64).bfloat16()
    found = functional.linear(x, made)
    wanted = functional.linear(x, made.detach().clone().as_subclass(torch.Tensor))
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.02)
    assert torch.equal(found, torch.cat([functional.linear(row[None], made) for row in x]))
    assert type(found) is torch.Tensor and made.packed is not None
    bias = torch.randn(8).bfloat16()
    torch.testing.assert_close(functional.linear(x, made, bias), wanted + bias, atol=0.1, rtol=0.02)


def test_other_functions_and_types_are_those_of_a_parameter() -> None:
    made, x = weight(), torch.randn(5, 64)
    assert torch.equal(functional.linear(x, made.float()), x @ made.float().T)
    assert torch.equal(made @ made.T, made.detach() @ made.detach().T) and made.packed is None
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other, made)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_mixtures_have_the_same_bits_for_any_chunk_and_batch(family: str, tmp_path: Path) -> None:
    model: Any = load(saved(mixture(family), tmp_path), weights="bfloat16", device="cpu").model
    ids = prompt(1, 45)
    whole = step(model, KeepCache(model, "full"), ids, logits_to_keep=0)
    for parts in ((1,) * 45, (2, 1, 30, 1, 11)):
        cached = KeepCache(model, "full")
        assert all(report.same_bits for report in cached.describe())
        found = [step(model, cached, part, logits_to_keep=0) for part in ids.split(parts, 1)]
        assert torch.equal(torch.cat(found, 1), whole)
    (ids, mask), lengths = padded([45, 30]), (45, 30)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = step(model, KeepCache(model, "full"), ids, mask, position_ids=positions)
    for row, length in enumerate(lengths):
        alone = step(model, KeepCache(model, "full"), ids[row : row + 1, 45 - length :])
        assert torch.equal(alone[0], together[row])


def test_loading_decodes_no_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the weight of a packed matrix decodes it, which takes seconds in a model of billions."""

    decoded: list[Any] = []

    def dense(one: PackedLinear) -> torch.Tensor:
        decoded.append(one)
        return one.dense(torch.bfloat16)

    monkeypatch.setattr(PackedLinear, "weight", property(dense))
    load(saved(mixture("qwen3_moe"), tmp_path), weights="bfloat16", device="cpu")
    assert not decoded


def test_routers_that_multiply_in_float32_stay_as_they_are(tmp_path: Path) -> None:
    """No trial of some numbers of rows could show that torch computes all of them alike."""
    model: Any = load(saved(mixture("nemotron_h"), tmp_path), weights="bfloat16", device="cpu").model
    routers = [one for one in model.modules() if "Router" in type(one).__name__]
    assert routers and not any(isinstance(one.weight, RouterWeight) for one in routers)
    assert not any(report.same_bits for report in KeepCache(model, "full").describe())
