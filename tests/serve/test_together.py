"""Sessions that decode share one call of the library a layer: every bit, byte and entry is that of each alone."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import tokenizer
from families import tiny
from helpers import prompt
from torch import Tensor

from kvkeep import KeepCache, transfer
from kvkeep.engine.batch import Read, forward
from kvkeep.errors import OutOfMemory
from kvkeep.models.fused import FusedLayers
from kvkeep.models.loading import load
from kvkeep.models.packed import row_independent
from kvkeep.passes.stream import CacheStream
from kvkeep.policies.selectors.kvzip import KVzip
from kvkeep.step import native
from kvkeep.step.native import steps
from kvkeep.stores.dynamic import DynamicLayer

pytestmark = pytest.mark.usefixtures("kernels")
METHODS: list[tuple[str, int | None, dict[str, str]]] = [
    ("full", None, {}), ("kv-direct", 20, {"checkpoint": "kv"}), ("kv-direct", 150, {"checkpoint": "kv"}),
    ("h2o", 20, {}), ("h2o", 170, {}), ("window", 20, {}), ("tova", 260, {}), ("snapkv", 60, {}),
]  # fmt: skip


def loaded(family: str, folder: Path, bits: bool = True, **given: Any) -> Any:
    """A model whose products have the same bits for any number of rows, where ``bits`` are compared."""
    tiny(family, **given).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = load(folder, weights="bfloat16", device="cpu").model
    if bits and not row_independent(model):
        pytest.skip("products of this machine depend on the number of rows")
    return model


@torch.no_grad()
def alone(model: Any, cache: KeepCache, ids: list[int]) -> Tensor:
    """One session, layer by layer, nothing of which is planned."""
    with patch.object(CacheStream, "plan", lambda self, *given: {}):
        return in_one_call(model, cache, ids)


def in_one_call(model: Any, cache: KeepCache, ids: list[int]) -> Tensor:
    """One session, all layers of a single token in one call where every layer's step is planned."""
    return model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True).logits[0, -1]


def read(model: Any, caches: list[KeepCache], ids: list[list[int]]) -> list[Tensor]:
    found = forward(model, [Read(cache, one) for cache, one in zip(caches, ids, strict=True)])
    for one in found:
        if isinstance(one, Exception):
            raise one
    return [one[-1] for one in found]  # type: ignore[index]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sessions each layer's steps were of."""
    calls: list[int] = []

    def all_layers(counts: list[int]) -> Any:
        calls.extend(counts)
        return table(counts)

    def one_layer(of_layer: Any, *given: Any) -> Any:
        calls.append(len(of_layer))
        return run(of_layer, *given)

    table, run = steps.count_table, native.run
    monkeypatch.setattr(steps, "count_table", all_layers)
    monkeypatch.setattr(native, "run", one_layer)
    return calls


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of each call that went through all of them."""
    calls: list[int] = []
    own = FusedLayers.__call__

    def counted(self: FusedLayers, *given: Any) -> Tensor:
        calls.append(len(self.layers))
        return own(self, *given)

    monkeypatch.setattr(FusedLayers, "__call__", counted)
    return calls


def test_a_token_of_one_cache_goes_through_all_layers_in_one_call(tmp_path: Path, passes: list[int]) -> None:
    model = loaded("llama", tmp_path)
    for name, budget, options in METHODS:
        caches = [KeepCache(model, name, budget, **options) for _ in range(2)]
        text, before = prompt(1, 190, 3)[0].tolist(), len(passes)
        for run, cache in zip((in_one_call, alone), caches, strict=True):
            run(model, cache, text[:-45])
        for token in text[-45:]:
            assert torch.equal(in_one_call(model, caches[0], [token]), alone(model, caches[1], [token])), name
        assert len(passes) - before > 30, name
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == len(text)


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "budget", "where"), [("full", None, None), ("kv-direct", 64, "host"), ("kv-direct", 150, "disk")]
)
def test_tokens_that_are_read_together_and_taken_back_go_through_all_layers_in_one_call(
    method: str, budget: int | None, where: str | None, tmp_path: Path, passes: list[int]
) -> None:
    """As drafts are, which have the bits of single layers."""
    model, text, random = loaded("llama", tmp_path), prompt(1, 420, 3), Random(1)
    given: dict[str, Any] = {} if where is None else {"checkpoint": "kv", "where": where}
    cache, other = (KeepCache(model, method, budget, **given) for _ in range(2))
    for one in (cache, other):
        model(input_ids=text[:, :140], cache=one)
    before, reads = len(passes), 0
    while (start := cache.get_seq_length()) < 400:
        count, reads = random.randint(2, 16), reads + 1
        ids, taken = text[:, start : start + count], random.randint(0, count - 1)
        found = model(input_ids=ids, cache=cache).logits
        with patch.object(CacheStream, "plan", lambda self, *given: {}):
            wanted = model(input_ids=ids, cache=other).logits
        assert torch.equal(found, wanted), (start, count)
        if taken:
            cache.crop(-taken), other.crop(-taken)
    assert len(passes) - before > 0.6 * reads  # others need a page, or go past the end of the ring


@torch.no_grad()
def test_steps_that_evict_nothing_are_planned_once_for_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are moved write and read what new ones would, also between passes of other kinds, after a crop, and
    once another cache has taken the beginning."""
    model, random, planned = loaded("llama", tmp_path, positions=2048), Random(3), 0
    real, text = DynamicLayer.plan, prompt(1, 800, 2)

    def counted(self: DynamicLayer, count: int = 1) -> Any:
        nonlocal planned
        planned += 1
        return real(self, count)

    cache, other = KeepCache(model), KeepCache(model)
    for one in (cache, other):
        model(input_ids=text[:, :500], cache=one)
    monkeypatch.setattr(DynamicLayer, "plan", counted)
    for token in text[0, 500:540].tolist():
        assert torch.equal(in_one_call(model, cache, [token]), alone(model, other, [token]))
    assert planned == 3 * len(cache.layers)  # the first, one that finds the page full, and the first of the next page
    for one in (cache, other):
        one.crop(-5)
    assert torch.equal(in_one_call(model, cache, [7]), alone(model, other, [7]))
    assert planned == 3 * len(cache.layers)  # its page is still there
    while (start := cache.get_seq_length()) < 790:
        ids = text[0, start : start + random.choice([1, 1, 1, 1, 2, 3, 20])].tolist()
        with patch.object(FusedLayers, "can_run", lambda self, planned: random.random() < 0.7):
            assert torch.equal(in_one_call(model, cache, ids), alone(model, other, ids)), start
        if random.random() < 0.1:
            taken = random.randint(1, 5)
            cache.crop(-taken), other.crop(-taken)
        if random.random() < 0.05:
            both = [transfer.begun(one, cache.get_seq_length()) for one in (cache, other)]
            assert torch.equal(alone(model, both[0], [7]), alone(model, both[1], [7]))


@pytest.mark.turns(2)
@pytest.mark.parametrize("spec", ["kvzip:sinks=2", "kvzip:least=1"])
def test_scored_entries_are_planned_though_heads_keep_different_numbers(
    spec: str, tmp_path: Path, passes: list[int]
) -> None:
    """Two sessions together answer as each does by itself, and but for rounding as layer by layer."""
    model = loaded("llama", tmp_path)
    caches = [KeepCache(model, spec, 24) for _ in range(5)]
    texts = [prompt(1, 190, seed)[0].tolist() for seed in (3, 4)]
    for number, cache in enumerate(caches):
        in_one_call(model, cache, texts[number % 2][:150])
    if "least" not in spec:
        assert any(len(layer.resident.banks) > 1 for layer in caches[0].layers)
    before = len(passes)
    for tokens in zip(*(text[150:] for text in texts), strict=True):
        together = read(model, caches[:2], [[token] for token in tokens])
        for token, cache, found in zip(tokens, caches[2:4], together, strict=True):
            assert torch.equal(in_one_call(model, cache, [token]), found)
        torch.testing.assert_close(alone(model, caches[4], [tokens[0]]), together[0], atol=0.1, rtol=0.1)
    assert len(passes) - before == 3 * 40
    for one, other in zip(caches[0].layers, caches[4].layers, strict=True):
        for bank, same in zip(one.resident.banks, other.resident.banks, strict=True):
            assert torch.equal(bank.slots, same.slots)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.int64, "expanded"])
def test_a_planned_step_takes_ranks_and_scores_as_selectors_may_give_them(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of any kind of number, and first scores that are one number expanded."""
    model = loaded("llama", tmp_path)
    if kind == "expanded":
        monkeypatch.setattr(KVzip, "arrive", lambda self, new, keys: new.slots[:1, :1].float().expand(new.slots.shape))
    else:
        monkeypatch.setattr(KVzip, "rank", lambda self, entries: (entries.slots.long() * 7919 % 101).to(kind))
    one, other = (KeepCache(model, "kvzip:least=1", 24) for _ in range(2))
    text = prompt(1, 90, 3)[0].tolist()
    for run, cache in ((in_one_call, one), (alone, other)):
        for part in (text[:60], *([token] for token in text[60:])):
            run(model, cache, part)
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        for bank, same in zip(ours.resident.banks, theirs.resident.banks, strict=True):
            assert torch.equal(bank.slots, same.slots) and torch.equal(bank.scores, same.scores)


@pytest.mark.parametrize("name", ["h2o+quantize:8", "snapkv+quantize:4", "window+quantize:4"])
def test_quantised_groups_plan_each_token_but_the_one_that_fills_a_group(
    name: str, tmp_path: Path, passes: list[int]
) -> None:
    model = loaded("qwen3", tmp_path)
    one, other = (KeepCache(model, name, 120) for _ in range(2))
    text = prompt(1, 250, 3)[0].tolist()
    for run, cache in ((in_one_call, one), (alone, other)):
        run(model, cache, text[:-70])
    before = len(passes)
    for token in text[-70:]:
        assert torch.equal(in_one_call(model, one, [token]), alone(model, other, [token]))
    assert 66 <= len(passes) - before < 70
    assert all(map(torch.equal, one.entry_states(), other.entry_states()))
    assert one.memory() == other.memory()


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sessions_together_are_as_each_alone(family: str, tmp_path: Path, shared: list[int], passes: list[int]) -> None:
    model = loaded(family, tmp_path)
    pairs = [[KeepCache(model, name, budget, **options) for name, budget, options in METHODS] for _ in range(2)]
    # Rings, pages and banks grow, fill up and turn while they decode.
    texts = [prompt(1, 120 + 20 * number + 45, number)[0].tolist() for number in range(len(METHODS))]
    for together, own, text in zip(*pairs, texts, strict=True):
        alone(model, together, text[:-45])
        alone(model, own, text[:-45])
    for step in range(45, 0, -1):
        found = read(model, pairs[0], [[text[-step]] for text in texts])
        for (name, budget, _), logits, own, text in zip(METHODS, found, pairs[1], texts, strict=True):
            assert torch.equal(logits, alone(model, own, [text[-step]])), (name, budget, step)
    assert passes
    assert max(shared) == len(METHODS) and sum(shared) > 0.8 * len(METHODS) * len(shared)
    for together, own in zip(*pairs, strict=True):
        assert together.get_seq_length() == own.get_seq_length()
        assert all(map(torch.equal, together.entry_states(), own.entry_states()))
        assert together.memory() == own.memory()


def test_latent_attention_goes_by_each_cache(tmp_path: Path, shared: list[int]) -> None:
    model = loaded("deepseek_v3", tmp_path, bits=False)
    texts = [prompt(1, 30 + number, number)[0].tolist() for number in range(2)]
    caches = [[KeepCache(model, "kv-direct", 20, checkpoint="kv"), KeepCache(model)] for _ in range(2)]
    for pair, text in zip(zip(*caches, strict=True), texts, strict=True):
        for cache in pair:
            alone(model, cache, text[:-1])
    found = read(model, caches[0], [[text[-1]] for text in texts])
    for logits, own, text in zip(found, caches[1], texts, strict=True):
        assert (logits - alone(model, own, [text[-1]])).abs().max() < 0.05
    latent = any(hasattr(module, "expand_kv") for module in model.modules())
    assert bool(shared) is not latent


@pytest.mark.parametrize("where", ["layers.1", "norm"])  # between layers, and after all of them at once
def test_a_pass_that_breaks_off_is_undone(where: str, tmp_path: Path, passes: list[int]) -> None:
    model = loaded("llama", tmp_path)
    methods = [METHODS[0], METHODS[1], METHODS[3]]
    pairs = [[KeepCache(model, name, budget, **options) for name, budget, options in methods] for _ in "ab"]
    texts = [prompt(1, 40, number)[0].tolist() for number in range(3)]
    for together, own, text in zip(*pairs, texts, strict=True):
        alone(model, together, text[:-2])
        alone(model, own, text[:-2])
    read(model, pairs[0], [[text[-2]] for text in texts])
    before = len(passes)

    def broken(*_: Any) -> None:
        raise MemoryError

    handle = model.model.get_submodule(where).register_forward_pre_hook(broken)
    errors = forward(model, [Read(cache, [7]) for cache in pairs[0]])
    assert all(isinstance(error, OutOfMemory) and "memory" in str(error) for error in errors)
    handle.remove()
    assert len(passes) - before == (3 if where == "norm" else 0)  # the exact ones were read again, each alone
    assert [cache.get_seq_length() for cache in pairs[0]] == [39] * 3
    found = read(model, pairs[0], [[text[-1]] for text in texts])
    for logits, own, text in list(zip(found, pairs[1], texts, strict=True))[:2]:  # the exact ones
        alone(model, own, [text[-2]])
        assert torch.equal(logits, alone(model, own, [text[-1]]))
    assert torch.isfinite(found[2]).all() and pairs[0][2].get_seq_length() == 40


def test_a_prompt_goes_beside_tokens(tmp_path: Path, shared: list[int]) -> None:
    model = loaded("llama", tmp_path)
    text, long = prompt(1, 30, 1)[0].tolist(), prompt(1, 50, 2)[0].tolist()
    one, other = KeepCache(model, "kv-direct", 20, checkpoint="kv"), KeepCache(model, "h2o", 20)
    alone(model, one, text[:-1])
    found = read(model, [other, one], [long[:16], text[-1:]])
    own, again = KeepCache(model, "h2o", 20), KeepCache(model, "kv-direct", 20, checkpoint="kv")
    alone(model, again, text[:-1])
    assert torch.equal(found[0], alone(model, own, long[:16])) and shared
    assert torch.equal(found[1], alone(model, again, text[-1:]))
