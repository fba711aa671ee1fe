"""Norms by the library: each kind is recognised, computes what its module does, and notices other parameters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.afmoe.modeling_afmoe import AfmoeRMSNorm
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from kvkeep.errors import trial
from kvkeep.models.norms import FusedNorm, fuse_norm

pytestmark = pytest.mark.usefixtures("kernels")
WIDTH = 72
NORMS: dict[str, tuple[Any, bool, float]] = {
    "Llama": (LlamaRMSNorm, False, 0.0),
    "Gemma 2": (Gemma2RMSNorm, False, 1.0),
    "Gemma 4": (Gemma4RMSNorm, False, 0.0),
    "Gemma 4, without weights": (lambda width: Gemma4RMSNorm(width, with_scale=False), False, 0.0),
    "Command-R": (CohereLayerNorm, True, 0.0),
    "Nemotron": (NemotronLayerNorm1P, True, 1.0),
    "OLMo": (OlmoLayerNorm, True, 0.0),
    "StableLM": (nn.LayerNorm, True, 0.0),
    "a layer norm without a bias": (lambda width: nn.LayerNorm(width, bias=False), True, 0.0),
}
"""What makes a norm, whether it subtracts the mean, and what it adds to its weights."""


def made(kind: str) -> Any:
    """A norm of bfloat16 whose forward is the library's."""
    torch.manual_seed(0)
    norm = NORMS[kind][0](WIDTH).bfloat16()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter))
    fuse_norm(norm, WIDTH)
    return norm


def rows(*shape: int) -> Tensor:
    return (3 * torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1)) + 1).bfloat16()


def assert_near(norm: Any, x: Tensor) -> None:
    found, wanted = norm(x), type(norm).forward(norm, x)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.01, atol=0.03)


@pytest.mark.parametrize("kind", NORMS)
@torch.no_grad()
def test_a_norm_computes_what_its_module_does(kind: str) -> None:
    norm = made(kind)
    fused = vars(norm)["forward"]
    assert isinstance(fused, FusedNorm) and (fused.centred, fused.offset) == NORMS[kind][1:]
    for x in (rows(2, 5), rows(1) * 2.0**-9):  # epsilon counts
        assert_near(norm, x)
    x = rows(7)
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(other(x), norm(x))


@pytest.mark.parametrize("name", ["weight", "bias"])
@torch.no_grad()
def test_another_parameter_counts(name: str) -> None:
    norm, x = made("StableLM"), rows(3)
    before = norm(x)
    getattr(norm, name).mul_(2)
    assert not torch.equal(norm(x), before) and torch.equal(norm(x), type(norm).forward(norm, x))
    setattr(norm, name, None if name == "bias" else nn.Parameter(torch.ones(WIDTH).bfloat16()))
    assert torch.equal(norm(x), type(norm).forward(norm, x))


@torch.no_grad()
def test_rows_of_another_width_are_the_modules() -> None:
    norm = made("Gemma 4, without weights")
    x = rows(3)[:, :64].contiguous()
    assert torch.equal(norm(x), type(norm).forward(norm, x))


@torch.no_grad()
def test_weights_of_float32_are_the_librarys_where_rows_stay_bfloat16() -> None:
    norm = AfmoeRMSNorm(WIDTH)
    torch.nn.init.normal_(norm.weight)
    fuse_norm(norm)
    assert isinstance(vars(norm)["forward"], FusedNorm)
    assert_near(norm, rows(5))


@torch.no_grad()
def test_other_modules_stay_as_they_are() -> None:
    of_heads = StableLmLayerNormPerHead(16, 4).bfloat16()
    of_any_width = Gemma4RMSNorm(WIDTH, with_scale=False)
    others = (nn.LayerNorm((3, WIDTH)).bfloat16(), LlamaRMSNorm(WIDTH), of_any_width)
    for norm in (of_heads, *others):
        with trial("a norm"):
            fuse_norm(norm)
        assert "forward" not in vars(norm)
