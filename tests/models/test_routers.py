"""Routers of experts: the values of torch, and no token goes elsewhere in a larger batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import saved
from helpers import padded, prompt, step
from mixtures import INNER_ROUTERS, MIXTURES, mixture
from torch.nn import functional

from kvkeep import KeepCache
from kvkeep.models.loading import load
from kvkeep.models.mlps import FusedMlp
from kvkeep.models.packed import PackedLinear
from kvkeep.models.routers import LibraryRouter, RouterWeight
from kvkeep.native.structures import SIGMOID, SOFTMAX

pytestmark = pytest.mark.usefixtures("kernels")


def weight(dtype: torch.dtype, experts: int = 8, hidden: int = 64) -> RouterWeight:
    made = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    return RouterWeight(made, requires_grad=False)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 0.1), (torch.float32, 1e-5)])
def test_products_are_those_of_torch_and_of_single_rows(dtype: torch.dtype, near: float) -> None:
    made, x = weight(dtype), torch.randn(33, 64).to(dtype)
    found = functional.linear(x, made)
    wanted = functional.linear(x, made.detach().clone().as_subclass(torch.Tensor))
    torch.testing.assert_close(found, wanted, atol=near, rtol=near / 5)
    assert torch.equal(found, torch.cat([functional.linear(row[None], made) for row in x]))
    assert type(found) is torch.Tensor and made.packed is not None
    bias = torch.randn(8).to(dtype)
    torch.testing.assert_close(functional.linear(x, made, bias), wanted + bias, atol=near, rtol=near / 5)


def test_other_functions_and_types_are_those_of_a_parameter() -> None:
    made, x = weight(torch.bfloat16), torch.randn(5, 64)
    assert torch.equal(functional.linear(x, made.float()), x @ made.float().T)
    assert torch.equal(made @ made.T, made.detach() @ made.detach().T) and made.packed is None
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other, made)


ROUTERS = {
    "deepseek_v2": "DeepseekV2TopkRouter", "deepseek_v3": "DeepseekV3TopkRouter",
    "ernie4_5_moe": "Ernie4_5_MoeTopKRouter", "glm4_moe": "Glm4MoeTopkRouter", "gpt_oss": "GptOssTopKRouter",
    "granitemoe": "GraniteMoeTopKRouter", "lfm2_moe": "Lfm2MoeTopKRouter", "minimax_m2": "MiniMaxM2TopKRouter",
    "mixtral": "MixtralTopKRouter", "nemotron_h": "NemotronHTopkRouter", "olmoe": "OlmoeTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
}  # fmt: skip


def dense(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The weight of each of eight experts."""
    return torch.zeros(len(weights), 8).scatter(1, chosen, weights.float())


@pytest.mark.parametrize("family", ROUTERS)
def test_a_router_sends_a_row_to_the_same_experts_beside_many_others(family: str, tmp_path: Path) -> None:
    """Eight experts: torch computes the sigmoid of one row, or of the last rows, in another way than of many."""
    plain = mixture(family)
    model: Any = load(saved(plain, tmp_path), weights="bfloat16", device="cpu").model
    name, router = next(pair for pair in model.named_modules() if type(pair[1]).__name__ == ROUTERS[family])
    forward = vars(router).get("forward")
    assert isinstance(router.weight, RouterWeight)
    assert type(forward) is LibraryRouter
    single = ("gpt_oss", "granitemoe", "lfm2_moe", "minimax_m2", "mixtral", "olmoe", "qwen3_moe")
    kept = torch.bfloat16 if family in single else torch.float32
    assert router.weight.dtype == kept and torch.equal(router.weight, plain.get_submodule(name).weight.to(kept))
    assert all(one.dtype == torch.float32 for name, one in model.named_buffers() if name.endswith("correction_bias"))
    x = torch.randn(3001, router.weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    biases = [torch.rand(8)] if family in ("lfm2_moe", "minimax_m2") else []
    with torch.no_grad():
        together, alone = router(x, *biases), [router(row[None], *biases) for row in x]
        theirs = type(router).forward(router, x, *biases)
    for found, one, other in zip(together, zip(*alone, strict=True), theirs, strict=True):
        assert torch.equal(found, torch.cat(one)) and found.dtype == other.dtype and found.shape == other.shape
    torch.testing.assert_close(together[0], theirs[0])
    distinct = theirs[0].sort().values.diff().ne(0).all(-1)  # of equal products, either expert may be chosen
    assert distinct.sum() > 2000
    near = {"atol": 1e-6, "rtol": 0.01 if theirs[1].dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(dense(*together[1:])[distinct], dense(*theirs[1:])[distinct], **near)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", INNER_ROUTERS)
def test_a_router_whose_weight_is_a_layer_is_the_librarys(family: str, weights: str, tmp_path: Path) -> None:
    model: Any = load(saved(mixture(family), tmp_path), weights=weights, device="cpu").model
    mlps = [layer.mlp for layer in model.model.layers]
    router = getattr(mlps[0], "router", None) or mlps[0].gate
    assert type(vars(router).get("forward")) is LibraryRouter
    assert all(isinstance(vars(one).get("forward"), FusedMlp) for one in mlps)
    x = torch.randn(1, 301, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    biases = [torch.rand(8)] if family == "afmoe" else []
    with torch.no_grad():
        found, theirs = router(x, *biases), type(router).forward(router, x, *biases)
        assert torch.equal(found[1], torch.cat([router(row[None, None], *biases)[1] for row in x[0]]))
    distinct = theirs[0].sort().values.diff().ne(0).all(-1)  # of equal products, either expert may be chosen
    torch.testing.assert_close(dense(*found[1:])[distinct], dense(*theirs[1:])[distinct], atol=1e-6, rtol=0.01)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID])
def test_a_router_chooses_the_greatest_scores_and_of_equal_ones_the_first(kind: torch.dtype, scores: int) -> None:
    made = weight(kind, 40)
    made.data[7] = made.data[30]
    x, biases = torch.randn(65, 64, generator=torch.Generator().manual_seed(2)).bfloat16() / 16, torch.rand(40) / 3
    biases[7] = biases[30]
    functional.linear(x.to(kind), made)  # packs the weight
    module = SimpleNamespace(weight=made, routed_scaling_factor=2.5)
    like = torch.empty(0), torch.empty(0), torch.empty(0, 6, dtype=torch.int64)
    for normalised, choice in product((False, True), (None, biases)):
        router = LibraryRouter(module, scores, normalised, 1, 0, like)
        logits, weights, chosen = router(x) if choice is None else router(x, choice)
        assert torch.equal(logits, functional.linear(x.to(kind), made).float())
        wanted = logits.double().softmax(-1) if scores == SOFTMAX else logits.double().sigmoid()
        order = wanted + (0 if choice is None else choice)
        expected = order.sort(dim=-1, descending=True, stable=True).indices[:, :6]
        assert (chosen == expected).all(-1).float().mean() > 0.95  # rounding may exchange neighbours
        assert not ((chosen == 30).any(-1) & ~(chosen == 7).any(-1)).any()
        found = wanted.gather(1, chosen)
        found = 2.5 * (found / found.sum(-1, keepdim=True) if normalised else found)
        torch.testing.assert_close(weights.double(), found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("path", ["plain", ""])
def test_a_mixture_in_one_call_has_the_bits_of_its_router_and_experts(
    path: str, tmp_path: Path, choose: Callable[[str], None]
) -> None:
    model: Any = load(saved(mixture("granitemoe"), tmp_path), weights="int8", device="cpu").model
    layer, mask = model.model.layers[0], None
    if path:
        choose(path)
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    angles = model.model.rotary_emb(x, torch.arange(40)[None])
    found = layer(x, attention_mask=mask, position_embeddings=angles)
    layer.forward.change(layer.forward.rotation, None, layer.forward.order)
    del layer.block_sparse_moe.forward
    assert torch.equal(layer(x, attention_mask=mask, position_embeddings=angles), found)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", MIXTURES)
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
