"""A bound model works like any model: it is saved, compiled, trained, and used with other caches."""

from __future__ import annotations

import copy
import io
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from families import VOCABULARY, tiny
from helpers import assert_near, forward
from transformers import DynamicCache

from kvkeep import KeepCache, KvkeepError, UnsupportedModelError, UsageError
from kvkeep.engine.batch import can_pack
from kvkeep.models import binding
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import NAME, bind

TEXT = torch.randint(2, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(0))
WAYS = [
    *(("full", None), ("static", 99), ("paged", None), ("kv-direct", 24), ("h2o", 24), ("snapkv+verified", 24)),
    *(("revive", 120), ("kvslimmer", 50), ("kvreviver", 100), ("streaming-llm", 24), ("h2o+merge", 24)),
    *(("asymkv", 50), ("kvslimmer-exact", 50), ("h2o+pages:1", 24), ("quantized:4", 120), ("h2o+checkpoint", 24)),
]


@pytest.fixture
def fresh() -> Any:
    """A model that a test may change, and that no other test has used: transformers' own hooks stay on a model."""
    return tiny.__wrapped__("llama")


def test_a_bound_model_with_recurrent_layers_can_be_saved_and_copied() -> None:
    """Each copy runs its own recurrent modules."""
    model, file = tiny.__wrapped__("bamba"), io.BytesIO()
    KeepCache(model, "h2o+verified", 16)
    torch.save(model, file)
    file.seek(0)
    for one in (model, torch.load(file, weights_only=False), copy.deepcopy(model)):
        module = one.model.layers[0].mamba
        assert module.forward.args[0] is module.forward.args[1].__self__ is module


def test_attention_modules_that_layers_share_are_refused() -> None:
    config = transformers.Zamba2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        layers_block_type=["mamba", "hybrid", "hybrid"], mamba_d_state=8, n_mamba_heads=4, adapter_rank=4,
        num_mem_blocks=1,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for method in ("kv-direct", "h2o", "snapkv+verified"):
        with pytest.raises(UnsupportedModelError, match="'zamba2' runs one attention module in several layers"):
            KeepCache(model, method, 16)
    cache = KeepCache(model)
    assert not can_pack(cache)
    forward(model, cache, TEXT[:, :-1])
    ours = forward(model, cache, TEXT[:, -1:]).logits
    assert_near(ours[:, -1], forward(model, DynamicCache(config=config), TEXT).logits[:, -1])


def test_binding_once_or_twice_does_not_affect_other_caches(fresh: Any) -> None:

    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in fresh.modules())

    plain, before = hooks(), forward(fresh, DynamicCache(config=fresh.config), TEXT).logits
    KeepCache(fresh, "h2o", 16)
    bound = hooks()
    assert bind(fresh) is bind(fresh) and fresh.config._attn_implementation == NAME and hooks() == bound > plain
    assert torch.equal(before, forward(fresh, DynamicCache(config=fresh.config), TEXT).logits)


def test_a_recurrent_module_keeps_the_forward_that_another_package_gave_it() -> None:
    """accelerate does so with modules that it moves between devices."""
    model = tiny.__wrapped__("lfm2")
    module, calls = Adapter(model).recurrent[0], list[int]()

    def moved(own: Any, *given: Any, **more: Any) -> Any:
        calls.append(1)
        return type(own).forward(own, *given, **more)

    module.forward = partial(moved, module)
    before = module.forward
    forward(model, KeepCache(model, "kv-direct", 64), TEXT)
    assert len(calls) == 1 and module.forward.args[1] is before


@pytest.mark.parametrize("at", ["adapter", "third layer"])
def test_an_interrupted_binding_leaves_stock_layers(fresh: Any, at: str) -> None:
    """After another binding, checkpoints of residuals work."""
    layers = fresh.model.layers
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        place = (binding, "Adapter") if at == "adapter" else (layers[2], "register_forward_pre_hook")
        patch.setattr(*place, Mock(side_effect=KeyboardInterrupt))
        bind(fresh)
    assert fresh.config._attn_implementation == "sdpa" and not any(layer._forward_pre_hooks for layer in layers)
    for kind in ("residual", "tokens"):
        forward(fresh, KeepCache(fresh, "kv-direct", 16, checkpoint=kind), TEXT)
        assert fresh.config._attn_implementation == NAME
        assert [len(layer._forward_pre_hooks) for layer in layers] == [1] * 4


def test_threads_that_make_its_first_caches_bind_a_model_once(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = fresh.set_attn_implementation

    def slowly(name: str) -> None:
        time.sleep(0.02)
        slow(name)

    monkeypatch.setattr(fresh, "set_attn_implementation", slowly)
    with ThreadPoolExecutor(4) as threads:
        assert len({*threads.map(bind, [fresh] * 4)}) == 1
    assert [len(layer._forward_pre_hooks) for layer in fresh.model.layers] == [1] * 4


def test_selectors_see_every_query_whatever_logits_are_kept() -> None:
    """transformers computes only the last queries of layers that share keys, if only their logits are wanted."""
    caches = [KeepCache(tiny("gemma4"), "h2o", 16, chunk=16) for _ in "ab"]
    for cache, keep in zip(caches, (0, 20), strict=True):
        assert forward("gemma4", cache, TEXT[:, :48], logits_to_keep=keep).logits.shape[1] == (keep or 48)
    assert all(map(torch.equal, *(cache.entry_states() for cache in caches)))


def test_eager_attention_is_refused(fresh: Any) -> None:
    fresh.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="eager.*sdpa"):
        bind(fresh)


@pytest.mark.parametrize("method", ["h2o", "kv-direct"])
def test_another_model_is_refused(fresh: Any, method: str) -> None:
    for other in (tiny("llama"), tiny("qwen2")):
        bind(other)
        cache = KeepCache(fresh, method, 16)
        with pytest.raises(UsageError, match="made for another model"):
            forward(other, cache, TEXT)
        assert cache.get_seq_length() == 0


@pytest.mark.turns(3)
@pytest.mark.parametrize(("method", "budget"), WAYS)
def test_a_cache_filled_in_inference_mode_continues_outside_it(method: str, budget: int | None) -> None:
    model, results = tiny("llama"), []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = KeepCache(model, method, budget)
        with mode():
            model(TEXT, cache=cache)
            cache.reorder_cache(torch.tensor([0]))
        results.append(
            [forward(model, cache, TEXT[:, at : at + size]).logits for at, size in ((0, 1), (1, 1), (2, 20))]
        )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_gradient_checkpointing_is_refused(fresh: Any) -> None:
    """transformers does not pass the cache to layers then."""
    fresh.activation_checkpointing_enable()
    fresh.train()
    with pytest.raises(KvkeepError, match="Gradient checkpointing"):
        fresh(TEXT, cache=KeepCache(fresh, "h2o", 16))
    fresh.eval()
    assert forward(fresh, KeepCache(fresh, "h2o", 16), TEXT).logits.shape[1] == 60


@pytest.mark.parametrize("kind", ["kv", "residual", "residual:2", "tokens"])
def test_hidden_states_exclude_rebuilt_tokens(kind: str) -> None:
    model, cache, stock = tiny("llama"), KeepCache(tiny("llama"), "kv-direct", 16, checkpoint=kind), DynamicCache()
    results = []
    for one in (cache, stock):
        forward(model, one, TEXT)
        results.append(forward(model, one, TEXT[:, :1], output_hidden_states=True).hidden_states)
    assert len(results[0]) == len(results[1]) == 5
    for own_states, stock_states in zip(*results, strict=True):
        torch.testing.assert_close(own_states, stock_states, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("by", ["argument", "config"])
def test_router_logits_need_an_input_of_one_chunk(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3_moe")
    options = {"output_router_logits": True} if by == "argument" else {}
    monkeypatch.setattr(model.config, "output_router_logits", by == "config")
    with pytest.raises(UsageError, match="'output_router_logits' is not available for an input longer than"):
        forward(model, KeepCache(model, "kv-direct", 16, checkpoint="residual"), TEXT, **options)
    results = [
        forward(model, cache, TEXT, **options)
        for cache in (KeepCache(model, "kv-direct", 60, chunk=60, checkpoint="residual"), DynamicCache())
    ]
    assert len(results[0].router_logits) == len(results[1].router_logits)
    torch.testing.assert_close(results[0].aux_loss, results[1].aux_loss)


class TestMasks:
    """Masks of the caller's own."""

    mask = torch.ones(1, 1, 60, 60, dtype=torch.bool).tril()
    mask[..., 5:9] = False
    mask[:, :, 5:9, 5:9] = torch.eye(4, dtype=torch.bool)

    @pytest.mark.parametrize("options", [{"checkpoint": "kv"}, {"checkpoint": "residual"}], ids=str)
    @pytest.mark.parametrize("method", ["kv-direct", "h2o+checkpoint", "snapkv+verified"])
    def test_exact_methods_follow_a_custom_mask(self, method: str, options: dict[str, str]) -> None:
        model = tiny("llama")
        cache = KeepCache(model, method, 16, **options)
        expected = forward(model, DynamicCache(), TEXT, attention_mask=self.mask).logits
        torch.testing.assert_close(
            forward(model, cache, TEXT, attention_mask=self.mask).logits, expected, atol=1e-4, rtol=1e-4
        )

    @pytest.mark.parametrize("kind", ["residual:2", "tokens"])
    def test_checkpoints_that_rerun_the_model_refuse_custom_masks(self, kind: str) -> None:
        model, cache = tiny("llama"), KeepCache(tiny("llama"), "kv-direct", 16, checkpoint=kind)
        with pytest.raises(UsageError, match="runs the model again with the model's own masks"):
            forward(model, cache, TEXT, attention_mask=self.mask)
        assert cache.get_seq_length() == 0

    def test_a_mask_of_the_wrong_size_is_refused(self) -> None:
        model, cache = tiny("llama"), KeepCache(tiny("llama"), "kv-direct", 60, chunk=60)
        with pytest.raises(UsageError, match="The attention mask covers 99 entries; it has to cover all 60"):
            forward(model, cache, TEXT, attention_mask=torch.ones(1, 1, 60, 99, dtype=torch.bool))
        assert cache.get_seq_length() == 0
