"""Packed experts: transformers' values, and the bytes of their codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import saved
from families import tiny
from gguf_files import written
from helpers import prompt
from mixtures import MIXTURES, mixture
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from kvkeep.errors import ModelError, UnsupportedModelError, UsageError
from kvkeep.models.experts import DOWN, GATES, UPS, ExpertForm, PackedExperts, experts_of, packed_experts
from kvkeep.models.gguf.model import read_model
from kvkeep.models.loading import describe, load
from kvkeep.models.packed import KINDS, Blocks, Packed, multiplied, quantised


def stored(form: ExpertForm, name: str, rows: torch.Tensor) -> torch.Tensor:
    """The matrices as transformers holds them: the inverse of ``form.rows``."""
    if not form.transposed:
        return rows
    return (torch.stack(rows.chunk(2, 1), 2).flatten(1, 2) if name == GATES else rows).transpose(1, 2)


def rounded(model: Any, bits: int) -> Any:
    """A copy whose matrices of experts are rounded as they are packed."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for module, form in experts_of(made).values():
            for name in form.matrices:
                rows = form.rows(name, weight := getattr(module, name))
                weight.copy_(stored(form, name, quantised(rows.flatten(0, 1), bits).dense().view(rows.shape)))
    return made


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("requested", ["bfloat16", "int8", "int4"])
def test_logits_are_those_of_the_rounded_weights(family: str, requested: str, tmp_path: Path) -> None:
    plain, bits = mixture(family), {"bfloat16": 16, "int8": 8, "int4": 4}[requested]
    model = load(saved(plain, tmp_path), weights=requested, device="cpu").model
    packed = [one for one in model.modules() if isinstance(one, PackedExperts)]
    assert len(packed) == (1 if family == "nemotron_h" else model.config.num_hidden_layers) and not experts_of(model)
    for name, (module, form) in experts_of(plain).items():
        found: Any = model.get_submodule(name)
        (gates,) = found.gates
        for ours, of in ((gates, form.first), (found.down, DOWN)):
            rows = form.rows(of, getattr(module, of)).flatten(0, 1)
            assert torch.equal(ours.dense(), quantised(rows, bits).dense())
    biases = [one for one in model.modules() if getattr(one, "bias", None) is not None and isinstance(one, Packed)]
    held = [*model.parameters(), *(one.bias for one in biases)]
    held += [one for layer in packed for one in (layer.gates_bias, layer.down_bias) if one is not None]
    assert describe(tmp_path, weights=requested).weight_bytes == sum(one.nbytes for one in held) + sum(
        one.out_features * one.in_features // KINDS[one.kind].elements * KINDS[one.kind].packed
        for one in model.modules()
        if isinstance(one, Packed)
    )
    with torch.no_grad():
        ours, theirs = model(prompt(2, 12)).logits.float(), rounded(plain, bits)(prompt(2, 12)).logits
    near = 0.9 if bits == 4 else 0.995  # attention has the bits of its weights, too
    assert torch.cosine_similarity(ours, theirs, dim=-1).median() > near


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("tokens", [1, 7])
def test_values_are_those_of_the_module(tokens: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("kvkeep.models.packed.library", lambda: None)
    experts = next(iter(experts_of(mixture("qwen3_moe").bfloat16()).values()))
    plain = experts.module
    weights = [getattr(plain, name).flatten(0, 1) for name in (GATES, DOWN)]
    gates, down = (Packed(quantised(one, 16)) for one in weights)
    halves = getattr(plain, GATES).chunk(2, 1)  # as a GGUF file has them
    apart = [Packed(quantised(one.flatten(0, 1), 16)) for one in halves]
    x = torch.randn(tokens, 32).bfloat16()
    chosen = torch.stack([torch.randperm(8)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2).bfloat16()
    with torch.no_grad():
        wanted = plain(x, chosen, shares)
        for parts in ([gates], apart):
            ours = PackedExperts(experts, parts, down)
            found = ours(x, chosen, shares)
            torch.testing.assert_close(found, wanted, atol=0.02 * float(wanted.abs().max()), rtol=0.02)
            each = torch.cat(
                [
                    PackedExperts(experts, parts, down)(*(one[row : row + 1] for one in (x, chosen, shares)))
                    for row in range(tokens)
                ]
            )
            assert torch.equal(each, found) or not native  # no token depends on others


def by_torch(experts: PackedExperts, module: Any, x: Any, chosen: Any, weights: Any) -> torch.Tensor:
    """What packed experts return, by a product for each expert and operations of torch between them."""

    def product(matrices: Any, rows: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
        blocks = [one.blocks() for one in matrices]
        parts = [Blocks(one.kind, one.rows.chunk(experts.num_experts)[expert]) for one in blocks]
        widths = [len(one.rows) for one in parts]
        split = [None] * len(parts) if biases is None else biases[expert].split(widths)
        return torch.cat([multiplied(Packed(one), rows, bias) for one, bias in zip(parts, split, strict=True)], -1)

    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(experts.num_experts):
        tokens, places = torch.where(chosen == expert)
        inner = product(experts.gates, x[tokens], experts.gates_bias)
        if experts.form.transposed:
            inner = module._apply_gate(torch.stack(inner.chunk(2, -1), -1).flatten(-2))
        elif experts.form.first == UPS:
            inner = module.act_fn(inner.double()).bfloat16()
        else:
            gates, ups = inner.chunk(2, -1)
            inner = module.act_fn(gates.double()).bfloat16() * ups
        found = product([experts.down], inner, experts.down_bias) * weights[tokens, places, None]
        out.index_add_(0, tokens, found.to(x.dtype).float())
    return out.to(x.dtype)


FORMS = {
    "joined": ("qwen3_moe", [8], 8), "apart": ("qwen3_moe", [8, 4], 4), "bfloat16": ("qwen3_moe", [16], 16),
    "other inputs": ("mixtral", [16, 4], 8), "biases": ("gpt_oss", [4], 8), "biases apart": ("gpt_oss", [4, 16], 4),
    "ups": ("nemotron_h", [8], 16),
}  # fmt: skip
"""The family, the bits of gates and ups, or of all, and those of the last matrices."""


@pytest.mark.turns(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("path", ["plain", ""])
@pytest.mark.parametrize("form", FORMS)
def test_one_call_has_the_bits_of_a_product_for_each_expert(
    form: str, path: str, choose: Callable[[str], None]
) -> None:
    if path:
        choose(path)
    family, bits, of_down = FORMS[form]
    experts = next(iter(experts_of(mixture(family).bfloat16()).values()))
    module, count = experts.module, experts.module.num_experts
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)  # some gates are beyond the limit of gpt-oss
        first, down = (experts.form.rows(name, getattr(module, name)) for name in experts.form.matrices)
        gates = [
            packed_experts([one], width, count)[0] for one, width in zip(first.chunk(len(bits), 1), bits, strict=True)
        ]
        packed = PackedExperts(experts, gates, packed_experts([down], of_down, count)[0])
        for tokens, k in [(1, 1), (1, 8), (2, 3), (7, 8), (40, 4), (300, 8)]:  # the last has more pairs than a batch
            x = torch.randn(tokens, 32).bfloat16()
            chosen = torch.rand(tokens, count + 1).argsort(-1)[:, :k]  # some do not exist
            for weights in (torch.rand(tokens, k), torch.rand(tokens, k).bfloat16()):
                found = packed(x, chosen, weights)
                assert torch.equal(found, by_torch(packed, module, x, chosen, weights))
                assert torch.equal(packed(x[-1:], chosen[-1:], weights[-1:]), found[-1:])


def test_experts_of_another_form_stay_as_they_are() -> None:
    assert not experts_of(tiny("qwen3_moe"))  # widths that are no multiples of 16
    assert experts_of(mixture("mixtral"))
    other = mixture("mixtral")
    for module, _ in list(experts_of(other).values()):
        module.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    assert not experts_of(other)


class LimitedExperts(MixtralExperts):
    limit = 0.0

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return super().forward(hidden_states.clamp(-self.limit, self.limit), top_k_index, top_k_weights)


def test_experts_that_limit_their_numbers_stay_as_they_are() -> None:
    """A trial of small numbers alone would not show it, nor a trial of another layer."""
    config = mixture("mixtral").config
    model = nn.ModuleList([LimitedExperts(config) for _ in range(3)])
    for module, limit in zip(model, (1e9, 7.0, 1e9), strict=True):
        module.limit = limit
    assert [*experts_of(model)] == ["0", "2"]


def test_a_folder_without_an_expert_is_refused(tmp_path: Path) -> None:
    saved(mixture("qwen3_moe"), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights[next(name for name in weights if "experts" in name and "down_proj" in name)]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="it lacks model.layers.0.mlp.experts|another shape for model.layers.0.mlp"):
        load(tmp_path, weights="int8", device="cpu")


def test_packed_experts_have_no_gradient(tmp_path: Path) -> None:
    model = load(saved(mixture("mixtral"), tmp_path), weights="bfloat16", device="cpu").model
    vectors = torch.randn(1, 5, 32).bfloat16().requires_grad_()
    with pytest.raises(UsageError, match="no gradient"):
        model(inputs_embeds=vectors)


def test_a_copy_multiplies_with_its_own_matrices(tmp_path: Path) -> None:
    model = load(saved(mixture("olmoe"), tmp_path), weights="int8", device="cpu").model
    with torch.no_grad():
        wanted = model(prompt()).logits
        assert torch.equal(copy.deepcopy(model)(prompt()).logits, wanted)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["Q4_K", "Q3_K", "Q8_0", "MXFP4", "BF16", "IQ2_S", "TQ1_0", "NVFP4"])
def test_experts_of_a_gguf_file_keep_their_blocks(kind: str, tmp_path: Path) -> None:
    file = written(tmp_path / "own.gguf", kind, hidden=256, inner=512, experts=4)
    model = load(file, device="cpu").model
    stored, module = read_model(file).tensors, model.model.layers[0].mlp.experts
    gates, down = (stored[f"model.layers.0.mlp.experts.{name}"] for name in (GATES, DOWN))
    assert gates.packs == down.packs == (kind in KINDS)
    found, expected = [one.dense() for one in (*module.gates, module.down)], [gates.dense(), down.dense()]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, (theirs if gates.packs else theirs.bfloat16()).flatten(0, 1).float())
    assert {one.kind for one in (*module.gates, module.down)} == {kind if gates.packs else "BF16"}
    with torch.no_grad():
        ours, theirs = (
            load(file, weights=form, device="cpu").model(prompt()[:, :9] % 30).logits for form in ("auto", "float32")
        )
    assert torch.cosine_similarity(ours.float(), theirs, dim=-1).min() > 0.99
    if gates.packs:
        half = written(
            tmp_path / "half.gguf", kind, hidden=256, inner=512, experts=4, without=["blk.0.ffn_up_exps.weight"]
        )
        with pytest.raises(UnsupportedModelError, match="makes it of 2"):
            load(half, device="cpu")
