"""Fused layers equal the modules, hooks are called, and layouts unlike Llama's use their modules."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import saved
from families import BESIDE_RECURRENT, COMMON, FAMILIES, LAYOUTS
from mixtures import mixture
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.models import fused as fusing
from kvkeep.models.fused import FusedLayer, FusedLayers
from kvkeep.models.layer_trial import agrees
from kvkeep.models.loading import load
from kvkeep.models.mlps import FusedMlp
from kvkeep.models.norms import FusedNorm
from kvkeep.models.rotary import rotations_of
from kvkeep.native.library import _share_threads, kernels, library
from kvkeep.native.structures import RELU2
from kvkeep.passes.hooks import ForwardHooks

pytestmark = pytest.mark.usefixtures("kernels")
FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma3", *LAYOUTS)
OTHERS: dict[str, Any] = {
    "gemma4 with experts": lambda: hf.Gemma4TextConfig(
        **COMMON, head_dim=16, global_head_dim=16, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4,
        top_k_experts=2, moe_intermediate_size=32,
    ),
    "stablelm with norms of each head": lambda: hf.StableLmConfig(**COMMON, qk_layernorm=True),
}  # fmt: skip
IDS = torch.randint(2, 97, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A maker of tiny models with packed weights, wide enough for codes of 8 and 4 bits; each made once."""

    @cache
    def make(family: str, weights: str = "bfloat16") -> Any:
        torch.manual_seed(0)
        config = (FAMILIES | LAYOUTS | OTHERS | BESIDE_RECURRENT)[family]()
        if hasattr(config, "intermediate_size"):
            config.intermediate_size = 64
        model = hf.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6.0) if parameter.ndim > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
            for number, layer in enumerate(model.get_decoder().layers if hasattr(model, "model") else ()):
                if hasattr(layer, "layer_scalar"):
                    layer.layer_scalar.fill_(0.75 + 0.125 * number)
        return load(saved(model, tmp_path_factory.mktemp(family)), weights=weights, device="cpu").model

    return make


def fused(model: Any) -> list[FusedLayer]:
    return [forward for part in model.modules() if isinstance(forward := vars(part).get("forward"), FusedLayer)]


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS, **given: Any) -> Tensor:
    return model(ids, **given).logits.float()


def plain(model: Any) -> Any:
    """The same model by its modules."""
    other = copy.deepcopy(model)
    for part in other.modules():
        if isinstance(vars(part).get("forward"), FusedLayer | FusedMlp | FusedNorm):
            del part.forward
    return other


def assert_alike(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to the rounding of bfloat16, which moves inputs from one of their 8-bit codes to the next."""
    assert torch.isfinite(ours).all()
    assert torch.cosine_similarity(ours, theirs, dim=-1).min() > 0.997
    assert (ours - theirs).abs().max() < 0.08 * theirs.abs().max()


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
def test_fused_layers_equal_the_modules(family: str, weights: str, made: Any) -> None:
    model = made(family, weights)
    assert len(fused(model)) == 4
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    assert_alike(logits(model, attention_mask=mask)[:, 9:], logits(plain(model), attention_mask=mask)[:, 9:])


def by_modules(model: Any) -> Any:
    """The same model by its modules, with the library's norms and MLPs."""
    other = plain(model)
    for part, module in zip(model.modules(), other.modules(), strict=True):
        if isinstance(forward := vars(part).get("forward"), FusedMlp | FusedNorm):
            vars(module)["forward"] = forward
    return other


@pytest.mark.parametrize("family", [*OTHERS, "gpt2"])
def test_an_unsupported_family_runs_its_modules(family: str, made: Any) -> None:
    """Its logits equal those of the modules bit for bit."""
    model, other = made(family), by_modules(made(family))
    found = logits(model)
    assert torch.isfinite(found).all()
    assert torch.equal(found, logits(other)) and not fused(model)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", LAYOUTS)
def test_other_layouts_have_the_same_bits_for_any_chunk_and_batch(family: str, made: Any) -> None:
    model = made(family, "int8")
    first = fused(model)[0]
    assert first.group is not None or first.separate
    whole = logits(model, IDS[:1, :45], cache=KeepCache(model, "full"))
    for parts in ((1,) * 45, (2, 1, 30, 1, 11)):
        cache = KeepCache(model, "full")
        assert all(report.same_bits for report in cache.describe())
        assert torch.equal(
            torch.cat([logits(model, ids, cache=cache) for ids in IDS[:1, :45].split(parts, 1)], 1), whole
        )
    assert torch.equal(logits(model, IDS[:, :45], cache=KeepCache(model, "full"))[:1], whole)


@pytest.mark.parametrize("family", ["cohere", "ernie4_5", "glm4", "llama"])
def test_a_layer_that_rotates_otherwise_is_not_taken(family: str, tmp_path: Path) -> None:
    """The sums of such weights, which are as initialised, would not show it: they depend little on attention."""
    config = LAYOUTS[family]() if family in LAYOUTS else FAMILIES[family]()
    config.intermediate_size = 64
    model = load(saved(hf.AutoModelForCausalLM.from_config(config), tmp_path), weights="bfloat16", device="cpu").model
    first, second, *_ = fused(model)
    ways = rotations_of(model)
    assert len(ways) > 3 and [one for one in ways if agrees(first, [one])] == [second.rotation]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "family",
    [
        "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "minimax_m2",
        "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
    ],
)  # fmt: skip
def test_a_mixture_has_the_bits_of_its_modules(family: str, tmp_path: Path) -> None:
    model: Any = load(saved(mixture(family), tmp_path), weights="int8", device="cpu").model
    mlps = [one.mlp for one in fused(model)]
    assert len(mlps) == model.config.num_hidden_layers and all(one is not None and one.router for one in mlps)
    layers = fused(model)[0].group
    assert layers is not None and len(layers.tables) == 1 and layers.layers == fused(model)
    other, mask = by_modules(model), torch.ones_like(IDS)
    mask[0, :9] = 0
    assert torch.equal(logits(model, attention_mask=mask)[:, 9:], logits(other, attention_mask=mask)[:, 9:])
    caches = KeepCache(model, "full"), KeepCache(other, "full")
    for ids in IDS[:1, :12].split((9, 1, 2), 1):
        assert torch.equal(*(logits(one, ids, cache=cache) for one, cache in zip((model, other), caches, strict=True)))


def test_scores_are_capped_like_those_of_the_modules(made: Any) -> None:
    model = made("gemma2", "bfloat16")
    ids, capped, uncapped = IDS[:1], plain(model), plain(model)
    for layer in uncapped.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    found = logits(model, ids, cache=KeepCache(model, "full"))
    apart, without = ((found - logits(one, ids)).abs().max() for one in (capped, uncapped))
    assert_alike(found, logits(capped, ids))
    assert without > 3 * apart


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", BESIDE_RECURRENT)
def test_attention_layers_beside_recurrent_ones_are_the_librarys(family: str, made: Any) -> None:
    model = made(family, "int8")
    alone = without_mlp = family == "nemotron_h"  # whose layers have one part each
    both = family == "falcon_h1"  # in each layer
    forwards = [vars(layer).get("forward") for layer in model.model.layers]
    found = [isinstance(one, FusedLayer) and (without_mlp or one.mlp is not None) for one in forwards]
    assert found == ([False, True, False] if alone else [both, True]) * 2
    mlps = [part for part in model.modules() if type(part).__name__.endswith(("MLP", "MoE", "MoeBlock"))]
    replaced = [isinstance(vars(one).get("forward"), FusedMlp) for one in mlps]
    assert replaced and all(replaced)
    other, mask = by_modules(model), torch.ones_like(IDS)
    mask[0, :9] = 0
    assert torch.equal(logits(model, attention_mask=mask)[:, 9:], logits(other, attention_mask=mask)[:, 9:])
    assert torch.cosine_similarity(logits(model), logits(plain(model)), dim=-1).median() > 0.99
    whole = logits(model, IDS[:1, :45], cache=KeepCache(model, "full"))
    for parts in ((1,) * 45, (2, 1, 30, 1, 11)):
        cache = KeepCache(model, "full")
        assert all(report.same_bits for report in cache.describe())
        found = [logits(model, ids, cache=cache) for ids in IDS[:1, :45].split(parts, 1)]
        assert torch.equal(torch.cat(found, 1), whole)


@pytest.mark.parametrize("gate", ["quick_gelu", "relu"])
def test_a_layer_whose_mlp_is_not_the_librarys_ends_before_it(gate: str, tmp_path: Path) -> None:
    config = hf.LlamaConfig(**COMMON | {"hidden_act": gate, "intermediate_size": 64}, head_dim=16)
    model = load(saved(hf.AutoModelForCausalLM.from_config(config), tmp_path), weights="bfloat16", device="cpu").model
    assert [layer.mlp for layer in fused(model)] == [None] * 4
    assert len(fused(model)[0].group.tables) == 4
    assert torch.equal(logits(model), logits(by_modules(model)))


@pytest.mark.parametrize(("family", "kinds", "calls"), [("gemma3", "sssffsss", [3, 2, 3]), ("gpt_oss", "sfsf", [4])])
def test_layers_that_are_rotated_alike_are_one_call(
    family: str, kinds: str, calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sliding windows, sinks, and angles by the type of a layer: longer than a window, and than its memory."""
    config = FAMILIES[family]()
    names = {"s": "sliding_attention", "f": "full_attention"}
    config.num_hidden_layers, config.layer_types = len(kinds), [names[kind] for kind in kinds]
    torch.manual_seed(0)
    model = load(saved(hf.AutoModelForCausalLM.from_config(config), tmp_path), weights="bfloat16", device="cpu").model
    assert [len(layer.group.layers) for layer in fused(model) if layer.group is not None] == calls
    whole = logits(model, IDS[:1], cache=KeepCache(model, "full"))
    for method in ({"method": "full"}, {"method": "kv-direct", "budget": 16, "checkpoint": "kv"}):
        ran: list[int] = []
        for together in (True, False):
            with monkeypatch.context() as patch:
                counted(patch, ran)
                if not together:
                    patch.setattr(ForwardHooks, "every_layer", lambda self: ())
                for parts in ((5, *(1,) * 55), (30, 16, 14), (50, 1, 2, 4, 3)):
                    cache = KeepCache(model, **method)
                    found = [logits(model, ids, cache=cache) for ids in IDS[:1].split(parts, 1)]
                    assert torch.equal(torch.cat(found, 1), whole)
        assert ran[: len(calls)] == calls
        assert len(ran) == len(calls) * (55 + 2 + 4) or method["method"] != "full"  # a full ring ends before others


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_a_bound_of_queries_and_keys_is_compared_where_it_is_reached(
    bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = hf.OlmoConfig(**COMMON | {"intermediate_size": 64}, clip_qkv=bound)
    folder = saved(hf.AutoModelForCausalLM.from_config(config), tmp_path)
    model = load(folder, weights="bfloat16", device="cpu").model
    assert len(fused(model)) == 4 and model.config.clip_qkv == bound
    assert torch.equal(logits(model), logits(by_modules(model)))
    monkeypatch.setattr(fusing, "CLIP", "a field that no config has")  # the library then clips nothing
    assert not fused(load(folder, weights="bfloat16", device="cpu").model)


def test_a_layer_that_drops_numbers_in_training_is_its_modules_then(tmp_path: Path) -> None:
    config = hf.PhiConfig(**COMMON | {"intermediate_size": 64}, resid_pdrop=0.5)
    model = load(saved(hf.AutoModelForCausalLM.from_config(config), tmp_path), weights="bfloat16", device="cpu").model
    assert len(fused(model)) == 4 and torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


def test_another_side_input_is_not_taken_for_the_same(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("gemma4")
    ways = rotations_of(model)
    layers = fused(model)
    assert [layer.kv_heads for layer in layers] == [2, 2, 0, 0]
    assert [agrees(layer, [layer.rotation]) for layer in layers] == [True] * 4 and len(ways) > 4
    for layer in layers:  # 0 times another projection is 0, too
        parts = layer.parts
        side = parts.side._replace(norm=parts.norms["input_norm"], activation=RELU2)
        monkeypatch.setattr(layer, "parts", parts._replace(side=side))
        assert not agrees(layer, [layer.rotation])
        monkeypatch.undo()
        layer.change(layer.rotation, layer.mlp, layer.order)


def test_another_factor_of_a_layers_output_counts(made: Any) -> None:
    for family in ("gemma4", "gemma4 without values"):
        model = copy.deepcopy(made(family))
        caches = [KeepCache(model, "full") for _ in range(2)]
        before = [logits(model, IDS[:1, :9], cache=cache) for cache in caches]
        token = logits(model, IDS[:1, 9:10], cache=caches[0])
        model.model.layers[1].layer_scalar.mul_(2)
        assert not torch.equal(logits(model, IDS[:1, 9:10], cache=caches[1]), token)
        assert not torch.equal(logits(model, IDS[:1, :9]), before[0])


@pytest.mark.parametrize(
    ("family", "part", "name"),
    [
        ("llama", "self_attn", "scaling"), ("granite", "", "residual_multiplier"),
        ("gemma2", "self_attn", "attn_logit_softcapping"), ("falcon_h1", "", "attn_out_multiplier"),
        ("falcon_h1", "feed_forward", "down_multiplier"),
    ],
)  # fmt: skip
def test_another_factor_counts(family: str, part: str, name: str, made: Any) -> None:
    """In prompts, and in steps of all layers, which once used the former one."""
    model = copy.deepcopy(made(family))
    caches = [KeepCache(model, "full") for _ in range(2)]
    for one in caches:
        logits(model, IDS[:1, :9], cache=one)
    before = logits(model, IDS[:1, :9]), logits(model, IDS[:1, 9:10], cache=caches[0])
    module = model.model.layers[1].get_submodule(part)
    setattr(module, name, getattr(module, name) * 4.0)
    found = logits(model, IDS[:1, :9]), logits(model, IDS[:1, 9:10], cache=caches[1])
    assert not any(map(torch.equal, before, found))
    assert_alike(found[0], logits(plain(model), IDS[:1, :9]))


def test_layers_of_two_widths_are_calls_of_their_own(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = made("gemma4 without values"), list[int]()
    assert [layer.dim for layer in fused(model)] == [16, 32] * 2
    assert [layer.kv_heads for layer in fused(model)] == [2, 1] * 2
    counted(monkeypatch, ran)
    cache = KeepCache(model, "full")
    for ids in IDS[:1, :12].split((9, 1, 2), 1):
        logits(model, ids, cache=cache)
    assert ran and ran == [1] * len(ran)


def test_hooks_on_fused_layers_are_called(made: Any) -> None:
    model, called = copy.deepcopy(made("llama")), []
    before = logits(model)
    handle = model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *given: called.append(given[2].shape))
    during = logits(model)
    handle.remove()
    assert called == [(2, 60, 32)]
    assert_alike(during, before)
    assert torch.equal(logits(model), before) and len(called) == 1


class Adapter(torch.nn.Module):
    """A module that adds to another one's output, as adapters do."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


def _replace(layer: Any) -> None:
    layer.input_layernorm.weight = torch.nn.Parameter(layer.input_layernorm.weight * 2)


def _load(layer: Any) -> None:
    layer.input_layernorm.load_state_dict({"weight": layer.input_layernorm.weight * 2})


def _assign(layer: Any) -> None:
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 2


CHANGES: dict[str, Any] = {
    "down": lambda layer: setattr(layer.mlp, "down_proj", Adapter(layer.mlp.down_proj)),
    "query": lambda layer: setattr(layer.self_attn, "q_proj", Adapter(layer.self_attn.q_proj)),
    "mlp": lambda layer: setattr(layer, "mlp", Adapter(layer.mlp)),
    "norm": lambda layer: setattr(layer, "input_layernorm", Adapter(layer.input_layernorm)),
    "weight": _replace,
    "loaded": _load,
    "data": _assign,
}
"""Changes of a loaded model's layer."""


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_fused_layer_count(change: str, made: Any) -> None:
    model = copy.deepcopy(made("llama"))
    before, caches = logits(model), [KeepCache(model, "full") for _ in range(2)]
    for one in caches:
        logits(model, IDS[:1, :9], cache=one)
    token = logits(model, IDS[:1, 9:10], cache=caches[0])  # all layers in one call
    with torch.no_grad():
        CHANGES[change](model.model.layers[1])
    assert not torch.equal(logits(model), before)
    assert_alike(logits(model), logits(plain(model)))
    assert not torch.equal(logits(model, IDS[:1, 9:10], cache=caches[1]), token)


def counted(patch: pytest.MonkeyPatch, ran: list[int]) -> None:
    """Note how many layers each call has run."""
    call = FusedLayers.__call__

    def noted(self: FusedLayers, *given: Any) -> Tensor:
        ran.append(len(self.layers))
        return call(self, *given)

    patch.setattr(FusedLayers, "__call__", noted)


def test_the_first_layer_is_the_only_one_called_where_it_runs_all(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, called, forward = made("llama"), [], FusedLayer.__call__

    def counted(self: FusedLayer, *given: Any, **more: Any) -> Any:
        called.append(self.attention.layer_idx)
        return forward(self, *given, **more)

    monkeypatch.setattr(FusedLayer, "__call__", counted)
    cache = KeepCache(model, "full")
    for ids, wanted in ((IDS[:1, :9], [0, 1, 2, 3]), (IDS[:1, 9:10], [0]), (IDS[:1, 10:12], [0])):
        called.clear()
        logits(model, ids, cache=cache)
        assert called == wanted


def test_another_layer_in_the_place_of_a_fused_one_runs(made: Any) -> None:
    model, other = copy.deepcopy(made("llama")), copy.deepcopy(made("llama"))
    layers = model.model.layers
    layers[1] = copy.deepcopy(layers[1])
    CHANGES["down"](layers[1])
    found = []
    for one in (model, other):
        cache = KeepCache(one, "full")
        logits(one, IDS[:1, :9], cache=cache)
        found.append(logits(one, IDS[:1, 9:10], cache=cache))
    assert not torch.equal(*found)
    assert_alike(found[0], logits(plain(model), IDS[:1, :10])[:, -1:])


def test_the_layers_are_a_list_as_before(made: Any) -> None:
    layers = made("llama").model.layers
    every = [layers[number] for number in range(4)]
    assert [*layers] == [*layers[:4]] == [*layers[:]] == every and len(layers) == 4
    part = layers[1:3]
    assert type(part) is torch.nn.ModuleList and [*part] == every[1:3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_fused_model_are_independent(copied: Any, made: Any) -> None:
    model = copy.deepcopy(made("qwen3"))
    other, before = copied(model), logits(model)
    layers = fused(other)
    assert len(layers) == 4 and torch.equal(logits(other), before)
    assert all(mine.layer is not yours.layer for mine, yours in zip(layers, fused(model), strict=True))
    for part in model.modules():
        for buffer in part.buffers(recurse=False):
            buffer.zero_()
    assert torch.equal(logits(other), before)


def test_changing_the_dtype_does_not_change_packed_weights(made: Any) -> None:
    model = copy.deepcopy(made("gemma3"))
    before = logits(model)
    for ask in (lambda: model.to(torch.float32), model.float, lambda: model.to("cpu"), model.bfloat16):
        ask()
        assert_alike(logits(model), before)
    ids = IDS[:1]
    assert_alike(logits(model, ids, cache=KeepCache(model, "full")), before[:1])


def test_without_kernels_nothing_is_fused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "library", lambda: None)
    model = load(model_folder, weights="bfloat16", device="cpu").model
    assert not any("forward" in vars(part) for part in model.modules()) and library() is not None


@pytest.mark.parametrize("library_threads", [False, True], ids=["torch", "library"])
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_model_has_the_same_logits_with_any_number_of_threads(weights: str, library_threads: bool, made: Any) -> None:
    model, before = made("qwen3", weights), torch.get_num_threads()
    ids, found = IDS.repeat(1, 5), []
    try:
        if library_threads:
            kernels().kvkeep_use_openmp(None, None)
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            kernels().kvkeep_set_threads(threads)
            cache = KeepCache(model, "snapkv+checkpoint:kv", budget=64, where="host")
            prompt = logits(model, ids[:1], cache=cache)
            steps = [logits(model, ids[1:, at : at + 1], cache=cache) for at in range(4)]
            found.append(torch.cat([prompt, *steps], 1))
    finally:
        torch.set_num_threads(before)
        _share_threads(kernels())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
