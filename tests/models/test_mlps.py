"""MLPs by the library: the values of their modules, which no other row changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import saved
from mixtures import mixture
from torch import Tensor, nn
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

from kvkeep.models.loading import load
from kvkeep.models.mlps import FusedMlp, replace_mlps
from kvkeep.models.packed import PackedLinear, quantised
from kvkeep.native.structures import GELU, GELU_TANH, RELU2, SILU

pytestmark = pytest.mark.usefixtures("kernels")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
MODULES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: LlamaMLP(hf.LlamaConfig(**SIZES)),
    "Llama with biases": lambda: LlamaMLP(hf.LlamaConfig(**SIZES, mlp_bias=True)),
    "gelu": lambda: LlamaMLP(hf.LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh")),
    "Falcon-H1": lambda: FalconH1MLP(hf.FalconH1Config(**SIZES, mlp_multipliers=[0.7, 1.3])),
    "GPT-NeoX": lambda: GPTNeoXMLP(hf.GPTNeoXConfig(**SIZES, hidden_act="gelu")),
    "LFM2": lambda: Lfm2MLP(hf.Lfm2Config(**SIZES, block_auto_adjust_ff_dim=False)),
    "Phi-3": lambda: Phi3MLP(hf.Phi3Config(**SIZES)),
    "Arcee": lambda: ArceeMLP(hf.ArceeConfig(**SIZES)),
    "Nemotron-H": lambda: NemotronHMLP(hf.NemotronHConfig(**SIZES)),
    "StarCoder 2": lambda: Starcoder2MLP(hf.Starcoder2Config(**SIZES)),
}


def packed(module: Any, bits: int = 8) -> Any:
    """The module with packed matrices, its activations larger than as initialised."""
    torch.manual_seed(0)
    for name, one in [*module.named_children()]:
        if isinstance(one, nn.Linear):
            bias = None if one.bias is None else torch.randn(one.out_features)
            setattr(module, name, PackedLinear(quantised(torch.randn(one.weight.shape) / 4, bits), bias))
    return nn.ModuleList([module.eval()])


def rows(count: int = 40) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@torch.no_grad()
def run(module: Any, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.parametrize("path", ["plain", ""])
@pytest.mark.parametrize("form", MODULES)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_an_mlp_has_the_values_of_its_module(form: str, bits: int, path: str, choose: Callable[[str], None]) -> None:
    (module,) = model = packed(MODULES[form](), bits)
    replace_mlps(model)
    assert isinstance(module.forward, FusedMlp)
    found = run(module, rows())
    wanted = type(module).forward(module, rows())
    assert (found - wanted).abs().max() <= 0.03 * wanted.abs().max()
    assert torch.equal(torch.cat([run(module, row[None]) for row in rows()]), found)
    if path:
        choose(path)
    assert torch.equal(run(module, rows().view(2, 20, 64)).view(40, 64), found)


class HalfMLP(LlamaMLP):
    """An MLP that computes more than the library does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_module_that_computes_more_stays_as_it_is() -> None:
    other = hf.LlamaConfig(**SIZES, hidden_act="quick_gelu")
    for module in (
        HalfMLP(hf.LlamaConfig(**SIZES)),
        LlamaMLP(other),
        nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)),
    ):
        replace_mlps(packed(module))
        assert "forward" not in vars(module)


def test_hooks_changes_and_gradients_are_the_modules() -> None:
    (module,) = model = packed(MODULES["Llama"]())
    replace_mlps(model)
    before, called = run(module, rows()), []
    handle = module.act_fn.register_forward_hook(lambda *given: called.append(given[2].shape))
    run(module, rows())
    handle.remove()
    assert called == [(40, 96)] and torch.equal(run(module, rows()), before)
    x = rows().requires_grad_()
    module(x).float().sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)
    module.down_proj = PackedLinear(quantised(torch.randn(64, 96), 8))
    assert torch.equal(run(module, rows()), type(module).forward(module, rows()))


def test_a_copy_has_its_own_matrices() -> None:
    model = packed(MODULES["Llama"]())
    replace_mlps(model)
    other = copy.deepcopy(model)
    before = run(other[0], rows())
    for buffer in model.buffers():
        buffer.zero_()
    assert torch.equal(run(other[0], rows()), before) and not run(model[0], rows()).any()


@pytest.mark.parametrize(
    ("gate", "number"),
    [("silu", SILU), ("gelu_pytorch_tanh", GELU_TANH), ("gelu_new", GELU_TANH), ("gelu", GELU), ("relu2", RELU2)],
)
def test_the_gate_is_the_activation_of_the_mlp(gate: str, number: int) -> None:
    (module,) = model = packed(LlamaMLP(hf.LlamaConfig(**SIZES, hidden_act=gate)))
    replace_mlps(model)
    assert module.forward.mlp.activation == number


@pytest.mark.parametrize("path", ["plain", ""])
def test_gelu_is_that_of_every_number(path: str, choose: Callable[[str], None]) -> None:
    """All bfloat16 numbers from 2^-40 to 12, and their negatives, 32 in a row."""
    if path:
        choose(path)
    x = torch.arange(0x2B80, 0x4140, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat([x, -x])[: len(x) * 2 // 32 * 32].view(-1, 32)
    module = GPTNeoXMLP(
        hf.GPTNeoXConfig(hidden_size=32, intermediate_size=32, num_attention_heads=4, hidden_act="gelu")
    )
    for name in ("dense_h_to_4h", "dense_4h_to_h"):
        setattr(module, name, PackedLinear(quantised(torch.eye(32), 16)))
    replace_mlps(model := nn.ModuleList([module]))
    found, wanted = run(model[0], x).double(), x.double() / 2 * torch.special.erfc(-x.double() / 2**0.5)
    assert ((found - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-37).all()


@pytest.fixture(scope="module")
def loaded_mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A maker of mixtures with packed weights, each made once."""

    @cache
    def load_mixture(family: str) -> Any:
        return load(saved(mixture(family), tmp_path_factory.mktemp(family)), weights="int8", device="cpu").model

    return load_mixture


@pytest.mark.parametrize("path", ["plain", "avx2", ""])
@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "nemotron_h", "qwen2_moe"])
def test_a_mixture_with_a_shared_expert_is_one_call(
    family: str, path: str, loaded_mixture: Callable[[str], Any], choose: Callable[[str], None]
) -> None:
    model = loaded_mixture(family)
    module = next(one for one in model.modules() if hasattr(one, "experts") and hasattr(one, "gate"))
    mlp = module.forward.mlp
    assert mlp.router is not None and mlp.inner and (mlp.share is not None) is (family == "qwen2_moe")
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, wanted = run(module, x), type(module).forward(module, x)
    assert (found - wanted).abs().max() <= (0.02 * wanted.abs().max() if mlp.share is not None else 0.0)
    assert torch.equal(torch.cat([run(module, row[None, None]) for row in x[0]], 1), found)
    if path:
        choose(path)
    assert torch.equal(run(module, x), found)
