"""Presses of the kvpress package as selectors: with a double of the package, and with the real one if installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from families import tiny
from helpers import assert_near, assert_same, bounded, expected, generate, generated, padded, prompt, step, stock
from kvkeep_lab.presses import presses

from kvkeep import EntryState, KeepCache, UnsupportedModelError, UsageError
from kvkeep.policies.methods import resolve

SEEN: list[dict[str, Any]] = []


@dataclass
class ScorerPress:
    compression_ratio: float = 0.0

    def score(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass
class EvenPress(ScorerPress):
    """Keeps the entries whose keys' first number is the largest, and says what it was shown."""

    sign: float = 1.0

    def score(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        assert attentions is None and "position_embeddings" in kwargs and keys.shape[:3] == values.shape[:3]
        cos, _ = module.rotary_emb(hidden, torch.zeros(1, 1))  # what a press would take for position 0
        notes = {"hidden": hidden, "keys": keys, "cos": cos, "ratio": self.compression_ratio}
        SEEN.append({"layer": module.layer_idx} | notes)
        return self.sign * keys[..., 0]


@dataclass
class WindowPress(EvenPress):
    window_size: int = 8

    def score(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        assert hidden.shape[1] > self.window_size, "Query length should be greater"
        return super().score(module, hidden, keys, values, attentions, kwargs)


@dataclass
class WholePress(ScorerPress):
    def score(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        assert keys.shape[2] == hidden.shape[1], "only supports prefill."
        return keys[..., 0]


@dataclass
class OtherFamilyPress(ScorerPress):
    def score(self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return module.no_such_projection(hidden)


@dataclass
class NestedPress(ScorerPress):
    press: Any = None

    def __post_init__(self) -> None:
        assert self.press is not None, "needs another press"


class FatePress:
    """Has no score."""


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A double of it, for all tests but those of the package itself."""
    if "real" in request.fixturenames:
        return
    double = ModuleType("kvpress")
    for press in (ScorerPress, EvenPress, WindowPress, WholePress, OtherFamilyPress, NestedPress, FatePress):
        setattr(double, press.__name__, press)
    monkeypatch.setitem(sys.modules, "kvpress", double)
    SEEN.clear()


def new(press: str, chunk: int = 10) -> KeepCache:
    return KeepCache(tiny("llama"), f"kvpress:{press}", budget=16, chunk=chunk)


def resident(cache: KeepCache, layer: int = 0) -> list[list[int]]:
    codes = cache.entry_states()[layer][0]
    return [(head == EntryState.RESIDENT).nonzero().flatten().tolist() for head in codes]


def stock_keys(tokens: torch.Tensor) -> torch.Tensor:
    cache = stock("llama")
    step("llama", cache, tokens)
    return cache.layers[0].keys[0]


def test_the_highest_scores_stay_and_later_entries_beside_them() -> None:
    """Keys of layer 0 depend on the tokens only, so the kept entries are known. Decoded tokens have no score and stay;
    for each, the entry of the lowest score is evicted."""
    tokens = prompt(1, 40)
    cache = new("even")
    step("llama", cache, tokens)
    best = [torch.sort(head[:, 0], descending=True).indices[:16].tolist() for head in stock_keys(tokens)]
    assert resident(cache) == [sorted(head) for head in best]
    for number in range(3):
        step("llama", cache, prompt(1, 1))
        assert resident(cache) == [sorted([*head[: 15 - number], *range(40, 41 + number)]) for head in best]
    for _ in range(20):
        step("llama", cache, prompt(1, 1))
    assert resident(cache) == [list(range(47, 63))] * 2  # no scored entry is left: the newest


def test_a_press_receives_its_chunk_and_all_keys() -> None:
    tokens = prompt(1, 40)
    cache = new("EvenPress,sign=-1")
    step("llama", cache, tokens)
    shown = [seen for seen in SEEN if seen["layer"] == 0]
    assert [seen["keys"].shape[2] for seen in shown] == [10, 20, 26, 26]
    assert [round(26 * (1 - seen["ratio"]), 2) for seen in shown[2:]] == [16.5, 16.5] and shown[0]["ratio"] == 0
    assert all(seen["hidden"].shape == (1, 10, 32) for seen in shown)
    torch.testing.assert_close(shown[1]["keys"][0], stock_keys(tokens)[:, :20])  # by slot
    attention = tiny("llama").model.layers[0].self_attn
    projected = attention.v_proj(shown[-1]["hidden"]).view(1, 10, 2, -1).transpose(1, 2)
    bank = bounded(cache)[0].resident.banks.banks[0]
    newest = (bank.slots[0] >= 30).nonzero().flatten().tolist()
    assert newest  # the hidden states are those that the values come from
    for column in newest:
        torch.testing.assert_close(projected[0, 0, int(bank.slots[0, column]) - 30], bank.values[0, column])
    angles = tiny("llama").model.rotary_emb(shown[0]["hidden"], torch.tensor([[20]]))[0]
    torch.testing.assert_close(shown[2]["cos"], angles)  # positions count from the chunk's first token
    assert "rotary_emb" not in dict(attention.named_modules())


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "kv"), ("qwen3", "residual"), ("gemma3", "tokens"), ("phi3", "residual")]
)
def test_a_press_with_checkpoints_is_exact(family: str, kind: str) -> None:
    method = f"kvpress:window,window_size=4+checkpoint:{kind}"
    cache = KeepCache(tiny(family), method, budget=16, chunk=9, where="host")
    ids, mask = padded([45, 45])
    assert_same(generate(family, cache, ids, mask), generated(family, (45, 45)))


def test_a_chunk_too_short_for_the_press_waits_for_the_next() -> None:
    cache = new("window", chunk=12)
    step("llama", cache, prompt(1, 12 + 12))
    step("llama", cache, prompt(1, 5))  # no more than the window of eight
    assert len({id(seen["hidden"]) for seen in SEEN if seen["layer"] == 0}) == 2
    assert all(head[-5:] == [24, 25, 26, 27, 28] for head in resident(cache))


def test_scores_follow_rollbacks_and_reordered_rows() -> None:
    """Heads then hold different numbers of entries. With a checkpoint, what follows is exact."""
    tokens, more, cache, twin = prompt(2, 40), prompt(2, 20), new("even"), new("even+checkpoint:kv")
    for each in (cache, twin):
        step("llama", each, tokens)
        each.crop(-15)
    cache.reorder_cache(torch.tensor([1, 0]))
    step("llama", cache, more)
    assert all(len(head) == 16 and max(head) < 45 for head in resident(cache))
    unbounded = expected("llama", torch.cat([tokens[:, :25], more], 1))
    assert_near(step("llama", twin, more)[:, -1], unbounded[:, -1])


def test_a_model_is_hooked_once_and_no_running_cache_remains() -> None:
    from kvkeep_lab import presses as adapter

    attention = tiny("llama").model.layers[0].self_attn
    new("even")
    before = len(attention._forward_pre_hooks), len(attention._forward_hooks)
    step("llama", new("even"), prompt(1, 30))
    assert (len(attention._forward_pre_hooks), len(attention._forward_hooks)) == before
    assert adapter._running.get() is None
    step("llama", stock("llama"), prompt(1, 30))
    assert adapter._running.get() is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("kvpress:odd", "Unknown press of kvpress 'odd': known are even, nested, otherfamily, whole, window"),
        ("kvpress:even,size=3", "'size=3' is not understood: EvenPress takes sign"),
        ("kvpress:window,window_size=many", "'many' is not understood: a value like 8"),
        ("kvpress:nested", "NestedPress refused these parameters: needs another press"),
        ("kvpress:fate", "Unknown press"),
    ],
)
def test_invalid_presses_and_parameters_are_refused(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(spec)


def test_presses_that_cannot_score_are_reported() -> None:
    with pytest.raises(UsageError, match=r"needs the name of a press \(kvpress:snapkv\): even, nested"):
        KeepCache(tiny("llama"), "kvpress", budget=16)
    with pytest.raises(UsageError, match="WholePress could not score 20 entries by 10 queries in layer 0: only supp"):
        step("llama", new("whole"), prompt(1, 30))
    with pytest.raises(UnsupportedModelError, match=r"OtherFamilyPress could not score .*no_such_projection'\.$"):
        step("llama", new("other-family"), prompt(1, 30))
    tokens, mask = prompt(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :5] = 0
    with pytest.raises(UsageError, match="ignore padding"):
        step("llama", new("even"), tokens, mask)


def test_a_missing_kvpress_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(UsageError, match=r"kvpress is not installed.*pip install --no-deps kvpress"):
        resolve("kvpress:snapkv")


@pytest.fixture
def real() -> Any:
    package = pytest.importorskip("kvpress", exc_type=ImportError)
    presses()  # puts our attention function back, which the import has wrapped
    return package


@pytest.mark.parametrize(
    "press",
    ["snapkv,window_size=4", "TOVAPress", "keydiff", "KnormPress", "expected-attention", "lagkv,lag_size=4", "cur"],
)
def test_presses_of_the_real_package_work(real: Any, press: str) -> None:
    model, tokens = tiny("llama"), prompt(1, 45)
    exact = KeepCache(model, f"kvpress:{press}+checkpoint:kv", budget=16, chunk=9, where="host")
    assert_near(step("llama", exact, tokens)[:, -1], expected("llama", tokens)[:, -1])
    cache = KeepCache(model, f"kvpress:{press}", budget=16, chunk=9)
    step("llama", cache, tokens)
    assert all(len(head) == 16 for layer in range(4) for head in resident(cache, layer))


def test_the_real_package_keeps_the_same_entries_as_by_itself(real: Any) -> None:
    """One chunk in layer 0, against ScorerPress.compress on the same keys."""
    model, tokens = tiny("llama"), prompt(1, 45)
    cache = KeepCache(model, "kvpress:snapkv,window_size=4,kernel_size=3", budget=16, chunk=16)
    cache.stream.chunk = 45
    shown: list[Any] = []
    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_pre_hook(lambda *given: shown.append(given[2]), with_kwargs=True)
    step("llama", cache, tokens)
    handle.remove()
    press = real.SnapKVPress(compression_ratio=1 - 16.5 / 45, window_size=4, kernel_size=3)
    slots = torch.arange(45.0)[None, None, :, None].expand(1, 2, 45, attention.head_dim)
    with torch.no_grad():
        kept = press.compress(attention, shown[0]["hidden_states"], stock_keys(tokens)[None], slots, None, shown[0])[1]
    assert resident(cache) == kept[0, :, :, 0].int().sort().values.tolist()
