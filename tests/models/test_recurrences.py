"""Recurrent modules: transformers' values, and no bit depends on how many tokens are read at once."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import saved
from families import VOCABULARY, tiny
from helpers import padded, prompt, step
from torch import nn
from transformers import AutoModelForCausalLM

from kvkeep import KeepCache
from kvkeep.models.loading import load
from kvkeep.models.recurrences import DeltaNet, Mamba2, ShortConv, layers_in_order, replace_recurrence

pytestmark = pytest.mark.usefixtures("kernels")


MODULES = {
    "lfm2": ("Lfm2ShortConv", ShortConv),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", DeltaNet),
    "bamba": ("BambaMixer", Mamba2),
    "falcon_h1": ("FalconH1Mixer", Mamba2),
    "falcon_h1 with norms": ("FalconH1Mixer", Mamba2),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", Mamba2),
    "nemotron_h": ("NemotronHMamba2Mixer", Mamba2),
}
BOTH = {"falcon_h1", "falcon_h1 with norms"}
"""Each layer has attention and a recurrence."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_chunk_size": 16,
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention"] * 2


def config(family: str) -> Any:
    if family == "lfm2":
        return tiny("lfm2").config
    if family == "bamba":
        return hf.BambaConfig(**COMMON, **MAMBA, attn_layer_indices=[1, 3])
    if family in BOTH:
        norms = {"mamba_rms_norm": True, "mamba_norm_before_gate": True} if family != "falcon_h1" else {}
        return hf.FalconH1Config(**COMMON, **MAMBA, mamba_d_ssm=128, ssm_in_multiplier=0.7, **norms)
    if family == "granitemoehybrid":  # Granite 4.0 H Micro has no experts
        return hf.GraniteMoeHybridConfig(
            **COMMON, **MAMBA, layer_types=LAYERS, num_local_experts=0, shared_intermediate_size=96,
            residual_multiplier=0.5, logits_scaling=3.0, position_embedding_type="nope",
        )  # fmt: skip
    if family == "nemotron_h":
        return hf.NemotronHConfig(
            **COMMON | {"num_hidden_layers": 6}, head_dim=16, ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=16,
            layers_block_type=["linear_attention", "full_attention", "mlp"] * 2, n_groups=2, chunk_size=16,
            time_step_min=0.5,
        )  # fmt: skip
    return hf.Qwen3_5TextConfig(
        **COMMON, head_dim=32, layer_types=LAYERS, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=32,
    )  # fmt: skip


@pytest.fixture(scope="module", params=MODULES)
def family(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A maker of models with packed weights, each made once."""

    @cache
    def made(family: str) -> Any:
        torch.manual_seed(1)
        own = AutoModelForCausalLM.from_config(config(family)).float()
        with torch.no_grad():
            for parameter in own.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(6.0)
        return load(saved(own, tmp_path_factory.mktemp(family)), weights="bfloat16", device="cpu").model

    return made


def modules_of(model: Any, family: str) -> list[Any]:
    return [one for one in model.modules() if type(one).__name__ == MODULES[family][0]]


def test_the_modules_of_a_packed_model_are_replaced(family: str, models: Any) -> None:
    model = models(family)
    layers = {0, 1, 2, 3} if family in BOTH else {0, 3} if family == "nemotron_h" else {0, 2}
    assert layers_in_order(model) == {one.layer_idx for one in modules_of(model, family)} == layers
    small = [one for name, one in model.named_parameters() if name.endswith(("A_log", "D", "dt_bias"))]
    assert bool(small) == (family != "lfm2") and all(one.dtype == torch.float32 for one in small)
    assert model.dtype == next(model.parameters()).dtype == torch.bfloat16
    assert not layers_in_order(tiny("lfm2"))


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("rows", [1, 3])
def test_values_are_those_of_the_module(count: int, rows: int, family: str, models: Any) -> None:
    module = modules_of(models(family), family)[0]
    ours = MODULES[family][1](module)
    x = torch.randn(rows, count, module.out_proj.out_features).bfloat16()
    mask = torch.ones(rows, count, dtype=torch.long)
    mask[-1, 0] = int(count == 1)
    wanted = type(module).forward(module, x, attention_mask=mask)
    near = 0.02 * float(wanted.detach().abs().max())
    torch.testing.assert_close(ours(x, attention_mask=mask), wanted, atol=near, rtol=0.02)


@pytest.mark.turns(2)
@pytest.mark.parametrize("parts", [(1,) * 45, (2, 1, 30, 1, 11), (44, 1)])
def test_no_bit_depends_on_the_tokens_that_are_read_at_once(parts: tuple[int, ...], family: str, models: Any) -> None:
    ids, model = prompt(), models(family)
    whole = step(model, KeepCache(model, "full"), ids, logits_to_keep=0)
    cached = KeepCache(model, "full")
    assert all(report.same_bits for report in cached.describe())
    found = [step(model, cached, part, logits_to_keep=0) for part in ids.split(parts, 1)]
    assert torch.equal(torch.cat(found, 1), whole)
    assert float((whole - whole.mean()).abs().max()) > 0.1


def test_rows_of_a_padded_batch_have_the_bits_that_they_have_alone(family: str, models: Any) -> None:
    (ids, mask), model = padded([45, 30]), models(family)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = step(model, KeepCache(model, "full"), ids, mask, position_ids=positions)
    for row, length in enumerate((45, 30)):
        alone = step(model, KeepCache(model, "full"), ids[row : row + 1, 45 - length :])
        assert torch.equal(alone[0], together[row])


def test_changed_weights_count(family: str, models: Any) -> None:
    """Also with another dtype, where parameters have other memory: the library once read what had been freed."""
    for change in (lambda model: model.bfloat16(), lambda model: [one.mul_(2) for one in model.parameters()]):
        model, (ids, _) = copy.deepcopy(models(family)), padded([12])
        step(model, KeepCache(model, "full"), ids)
        with torch.no_grad():
            change(model)
        kept = [torch.empty_like(one).fill_(7.0) for one in model.parameters() for _ in range(9)]  # in freed memory
        module = modules_of(model, family)[0]
        x = torch.randn(1, 9, module.out_proj.out_features).bfloat16()
        assert torch.equal(vars(module)["forward"](x), MODULES[family][1](module)(x)) and kept


def test_another_layout_stays_as_it_is() -> None:
    module = modules_of(tiny.__wrapped__("lfm2"), "lfm2")[0]
    module.conv = nn.Conv1d(64, 64, 3, groups=64, padding=2, bias=True)
    replace_recurrence(module)
    assert "forward" not in vars(module)
