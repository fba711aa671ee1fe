"""A step that was left in the middle is undone, or the cache says that it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCABULARY, tiny
from helpers import broken, forward
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config

from kvkeep import KeepCache, KvkeepError
from kvkeep.transfer import state

TEXT = torch.randint(2, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(0))
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
        monkeypatch.setattr("kvkeep.passes.stream.native.attend_all", lambda *given: None)
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
