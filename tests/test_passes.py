"""A step that was left in the middle is undone, or the cache says that it cannot be."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import saved
from families import VOCABULARY, tiny
from helpers import broken, forward
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config

from kvkeep import KeepCache, KvkeepError, UsageError
from kvkeep.engine.batch import Read
from kvkeep.engine.batch import forward as together
from kvkeep.models import fused
from kvkeep.models.loading import load
from kvkeep.passes import hooks
from kvkeep.passes.stream import CacheStream
from kvkeep.transfer import state

TEXT = torch.randint(2, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(0))
PLANNED: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "kv-direct", "budget": 16, "checkpoint": "kv", "where": "host"},
    {"method": "kv-direct", "budget": 16, "checkpoint": "kv", "where": "disk"},
]
WAYS = [("full", None), ("static", 70), ("paged", None), ("kv-direct", 16), ("h2o", 16), ("snapkv+verified", 16)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=["interrupt", "exception"])
@pytest.mark.parametrize(("method", "budget"), WAYS)
def test_what_was_left_in_the_middle_is_undone(method: str, budget: int | None, error: type[BaseException]) -> None:
    """torch tells its hooks of exceptions and not of interrupts, so the second is found out later."""
    model = tiny("llama")
    cache, other = (KeepCache(model, method, budget) for _ in range(2))
    for one in (cache, other):
        forward(model, one, TEXT[:, :40])
    for layer in (0, 2):
        with broken(model, layer, error):
            forward(model, cache, TEXT[:, 40:50])
        assert cache.get_seq_length() == 40
    again = cache.fork()
    for one in (cache, again, other):
        one.crop(-2) if method in ("full", "static") else None
    expected = forward(model, other, TEXT[:, 40:50]).logits
    for one in (cache, again):
        logits = forward(model, one, TEXT[:, 40:50]).logits
        if method == "h2o":  # whose layers had let entries leave already
            assert logits.isfinite().all() and {layer.length for layer in one.layers} == {50}
        else:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def native_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose steps the library runs."""
    return load(saved(tiny("llama"), tmp_path_factory.mktemp("native")), weights="bfloat16", device="cpu").model


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("written", [True, False], ids=["behind the call", "before it"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=["interrupt", "exception"])
@pytest.mark.parametrize("at_once", [True, False], ids=["all layers", "layer by layer"])
@pytest.mark.parametrize("options", PLANNED, ids=lambda one: f"{one['method']} {one.get('where', '')}")
def test_a_planned_step_that_was_left_is_undone(
    options: dict[str, Any],
    at_once: bool,
    error: type[BaseException],
    written: bool,
    native_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python raises an interrupt behind the call that has written the entries, and memory may run out before it. What
    an entry has replaced is in the checkpoint, or still in its place."""
    model, calls = native_model, 0
    cache, other = (KeepCache(model, **options) for _ in range(2))
    for one in (cache, other):
        forward(model, one, TEXT[:, :30])
    real = fused.run_layers if at_once else hooks.native.run

    def left(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        last = at_once or calls % 3 == 0
        result = real(*given) if written or not last else None
        if last:
            raise error
        return result

    for step, stop in pairwise(sorted({*range(30, 56, 4), *range(31, 56, 4)})):  # one token or three
        if step % 3 == 0:
            with monkeypatch.context() as patch, pytest.raises(error):
                if not at_once:
                    patch.setattr(fused.FusedLayers, "can_run", lambda self, steps: False)
                patch.setattr(*((fused, "run_layers", left) if at_once else (hooks.native, "run", left)))
                forward(model, cache, TEXT[:, step:stop])
            assert cache.get_seq_length() == step
        found, wanted = (forward(model, one, TEXT[:, step:stop]).logits for one in (cache, other))
        assert torch.equal(found, wanted), step
    assert calls
    again = state(cache), state(other)
    assert again[0].keys() == again[1].keys()


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_windows_cannot_be_undone(method: str) -> None:
    model, cache = tiny("gemma3"), KeepCache(tiny("gemma3"), method, 16 if method == "h2o" else None)
    expected = forward(model, cache, TEXT).logits
    cache.reset()
    forward(model, cache, TEXT[:, :30])
    with broken(model, 2, KeyboardInterrupt):
        forward(model, cache, TEXT[:, 30:40])
    for act in (
        lambda: forward(model, cache, TEXT[:, 30:]),
        lambda: cache.crop(-1),
        lambda: state(cache),
        lambda: cache.reorder_cache(torch.tensor([0])),
    ):
        with pytest.raises(KvkeepError, match=r"left in the middle of a step.*call reset\(\)"):
            act()
    cache.reset()
    assert torch.equal(forward(model, cache, TEXT).logits, expected)


def test_a_stock_cache_is_left_alone() -> None:
    """Watching a model changes nothing for caches that are not kvkeep's."""
    model, stock = tiny("llama"), DynamicCache()
    KeepCache(model)
    forward(model, stock, TEXT[:, :40])
    with broken(model, 2, KeyboardInterrupt):
        forward(model, stock, TEXT[:, 40:50])
    assert [layer.get_seq_length() for layer in stock.layers] == [50, 50, 40, 40]


@pytest.mark.parametrize("cut", [None, -3])
def test_an_interrupt_in_the_last_chunk_leaves_nothing_for_the_next_pass(cut: int | None) -> None:
    model, seen = tiny("llama"), []
    cache = KeepCache(model, "kv-direct", 16, chunk=16)

    def interrupted(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(model, cache, TEXT, logits_to_keep=1)
    handle.remove()
    if cut is not None:
        cache.crop(cut)
    assert forward(model, cache, TEXT[:, :3]).logits.shape[1] == 3
    other = KeepCache(model, "kv-direct", 16, chunk=16)
    assert forward(model.model, other, TEXT).last_hidden_state.shape[1] == 60


@pytest.mark.parametrize("method,budget", [("full", None), ("static", 64)])
@pytest.mark.parametrize("refuses", ["heads of odd width", "the kernel"])
def test_without_the_kernel_a_later_chunk_sees_the_past_and_no_padding(
    method: str, budget: int | None, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel needs no mask; what takes its place must not go without."""
    width = 33 if refuses == "heads of odd width" else 36
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=width, n_layer=2, n_head=3, n_positions=64, bos_token_id=1)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    if refuses == "the kernel":
        monkeypatch.setattr("kvkeep.step.native.attend_all", lambda *given: None)
    ids, mask = torch.randint(1, VOCABULARY, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    ids[0, :7] = mask[0, :7] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        cache = KeepCache(model, method, budget)
        found = [
            model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places[:, start:stop],
                cache=cache,
            ).logits
            for start, stop in ((0, 12), (12, 29), (29, 30))
        ]  # fmt: skip
    seen = mask.bool()
    torch.testing.assert_close(torch.cat(found, 1)[seen], expected[seen], atol=0.02, rtol=0.02)
    assert refuses == "the kernel" or not cache.describe()[0].same_bits


def elsewhere(act: Callable[[], object]) -> Any:
    """Return what ``act`` returns or raises in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(("method", "budget"), WAYS)
def test_another_thread_is_refused_during_a_pass(method: str, budget: int | None) -> None:
    model, found = tiny("llama"), []
    cache, other = (KeepCache(model, method, budget) for _ in range(2))
    for one in (cache, other):
        forward(model, one, TEXT[:, :40])

    def intruding(*_: Any) -> None:
        acts: tuple[Callable[[], object], ...] = (
            lambda: forward(model, cache, TEXT[:, 41:42]),
            lambda: forward(model, cache, TEXT[:, 40:60]),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([0])),
            cache.fork,
            lambda: state(cache),
            cache.reset,
            lambda: together(model, [Read(cache, [3])])[0],
        )
        found.extend(elsewhere(act) for act in acts)

    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: None if found else intruding())
    for token in (40, 41):
        logits = [forward(model, one, TEXT[:, token : token + 1]).logits for one in (cache, other)]
        assert torch.equal(*logits)
    handle.remove()
    assert [type(one) for one in found] == [UsageError] * 8 and all("another thread" in str(one) for one in found)
    assert not isinstance(elsewhere(lambda: forward(model, cache, TEXT[:, 42:44])), Exception)


def test_a_long_text_is_one_threads_from_chunk_to_chunk() -> None:
    model, found = tiny("llama"), []
    cache = KeepCache(model, "kv-direct", 16, chunk=16)
    cache.stream.record.tell(lambda done: found.append(elsewhere(lambda: forward(model, cache, TEXT[:, :1]))))
    forward(model, cache, TEXT)
    assert len(found) == 4 and all(isinstance(one, UsageError) for one in found)


@pytest.mark.parametrize("method", ["full", "kv-direct"])
def test_another_thread_goes_on_after_an_interrupt(method: str) -> None:
    model = tiny("llama")
    cache, other = (KeepCache(model, method, 16 if method == "kv-direct" else None) for _ in range(2))
    for one in (cache, other):
        forward(model, one, TEXT[:, :40])
    with broken(model, 2, KeyboardInterrupt):
        forward(model, cache, TEXT[:, 40:50])
    expected = forward(model, other, TEXT[:, 40:50]).logits
    torch.testing.assert_close(elsewhere(lambda: forward(model, cache, TEXT[:, 40:50]).logits), expected)


@pytest.mark.parametrize(("method", "budget"), WAYS)
def test_undoing_a_pass_may_be_interrupted(method: str, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    cache, other = (KeepCache(model, method, budget) for _ in range(2))
    for one in (cache, other):
        forward(model, one, TEXT[:, :40])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for name in ("commit", "forget_from"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(CacheStream, name, interrupted)
            forward(model, cache, TEXT[:, 40:41])
    expected = [forward(model, other, TEXT[:, place : place + 1]).logits for place in (40, 41)]
    found = [forward(model, cache, TEXT[:, place : place + 1]).logits for place in (40, 41)]
    assert cache.get_seq_length() == 42
    if method != "h2o":
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("method", "budget"), WAYS)
def test_a_lossy_cache_says_once_that_a_pass_was_undone(method: str, budget: int | None) -> None:
    model, cache = tiny("llama"), KeepCache(tiny("llama"), method, budget)
    forward(model, cache, TEXT[:, :40])
    with broken(model, 2, KeyboardInterrupt):
        forward(model, cache, TEXT[:, 40:50])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            forward(model, cache, TEXT[:, 40:41])
    assert ["call reset()" in str(one.message) for one in told] == [True] * (method == "h2o")
