"""The contract of fates that keep what leaves in another form: bytes within the budget at every moment, rows apart,
rollbacks, sessions, however it is decoded.

What leaves is kept by groups of 32 slots, the same in all rows, so a padded row is not quite what it is alone; what
must hold instead is that no row sees another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import leave_in_the_middle, padded, read, tiny

from kvkeep import KeepCache, Session, load_session, save_session
from kvkeep.stores.layer import Layer
from kvkeep.contracts import EntryState

BUDGET, CHUNK, PROMPT = 130, 48, 260
FAMILIES = ["llama", "gemma3", "gpt2", "deepseek_v3", "gemma4", "phi3"]
METHODS = [
    "revive",
    "quantized:4",
    "h2o+quantize:8",
    "snapkv:window=6,kernel=3+quantize:2",
    "longcache",
    "tova+segments:2",
]
LOWRANK = "lowrank:4"  # which keeps nothing as it was, and wants a plain projection of keys
# Their memory grows with the text: they bound the work of a step.
UNBOUNDED = ["longcache", "tova+segments:2"]
EVERY = [(family, method) for method in METHODS for family in FAMILIES]
LOW = [("llama", LOWRANK), ("qwen2", LOWRANK)]
# Each method on two families and each family with two methods.
SOME = [(FAMILIES[(number + step) % 6], method) for number, method in enumerate(METHODS) for step in (0, 3)]


def new_cache(family: str, method: str, budget: int = BUDGET) -> KeepCache:
    return KeepCache(tiny(family), method, budget, chunk=CHUNK)


def own(cache: KeepCache) -> list[Layer]:
    return [layer for layer in cache.layers if isinstance(layer, Layer)]


def step(family: str, cache: KeepCache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return tiny(family)(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits


def generate(family: str, cache: KeepCache, ids: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(5)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return tiny(family).generate(ids, past_key_values=cache, **(settings | options))


def assert_within(cache: KeepCache, rows: int, budget: int = BUDGET) -> None:
    """What holds after every chunk and token."""
    resident = sum(layer.resident_bytes for layer in own(cache))
    kept = 0 if cache.method.name in UNBOUNDED else cache.compressed_bytes()
    assert resident + kept <= rows * budget * cache.geometry.full_bytes_per_token
    assert all(layer.length == cache.get_seq_length() and layer.pending is None for layer in own(cache))


@pytest.mark.parametrize(("family", "method"), [*EVERY, *LOW])
def test_bytes_stay_within_the_budget_after_every_chunk_and_token(family: str, method: str) -> None:
    cache, seen = new_cache(family, method), []

    def check(length: int) -> None:
        assert_within(cache, 2)
        seen.append(length)

    cache.stream.on_progress = check
    ids, mask = padded([PROMPT, 150])
    assert read(family, cache, ids, mask, 40).isfinite().all()
    assert seen[-1] == PROMPT and len(seen) > 43
    for layer in own(cache):
        found = cache.entry_states()[layer.index][0]
        assert (found == (EntryState.CHECKPOINTED if method in UNBOUNDED else EntryState.QUANTISED)).any()
        assert (found == EntryState.RESIDENT).any() or method == LOWRANK


@pytest.mark.parametrize(("family", "method"), EVERY)
def test_until_something_leaves_it_is_the_unbounded_cache(family: str, method: str) -> None:
    ids, mask = padded([8, 5])
    ours = read(family, new_cache(family, method), ids, mask, 3)
    theirs = read(family, KeepCache(tiny(family), "full"), ids, mask, 3)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("family", "method"), [*SOME, *LOW])
def test_rows_do_not_see_each_other(family: str, method: str) -> None:
    ids, mask = padded([PROMPT, 230])
    others = ids.clone()
    others[0] = others[0].flip(0)
    one, other = (read(family, new_cache(family, method), each, mask, 36) for each in (ids, others))
    torch.testing.assert_close(one[1], other[1], atol=2e-4, rtol=2e-4)
    assert (one[0] - other[0]).abs().max() > 0.1


@pytest.mark.parametrize(("family", "method"), [*SOME, *LOW])
def test_rows_in_another_order_repeated_and_left_out_go_on(family: str, method: str) -> None:
    """Long enough for a group to become one."""
    ids, mask = padded([PROMPT, 200, 230])
    order = torch.tensor([2, 0, 1, 1])
    one, other = new_cache(family, method), new_cache(family, method)
    read(family, one, ids, mask, 3)
    read(family, other, ids[order], mask[order], 3)
    one.reorder_cache(torch.tensor([2, 0, 1]))
    one.batch_repeat_interleave(2)
    one.batch_select_indices(torch.tensor([True, False, True, False, True, True]))
    mask = mask[order]
    for number in range(36):
        mask = torch.cat([mask, mask.new_ones(4, 1)], 1)
        token = ids[order, number + 60 : number + 61]
        ours, theirs = (step(family, each, token, mask) for each in (one, other))
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    assert_within(one, 4)


@pytest.mark.parametrize(("family", "method"), [*SOME, *LOW])
def test_crop_and_go_on(family: str, method: str) -> None:
    """Forgotten slots leave holes, what was lost stays lost, and what comes next is as finite as ever."""
    ids, _ = padded([PROMPT])
    cache = new_cache(family, method)
    cache.activate_past_recording()
    step(family, cache, ids[:, :200])
    gone = 3 if any(cache.is_sliding) else 120  # sliding windows record one round only
    step(family, cache, ids[:, 200:220])
    before = [codes.clone() for codes in cache.entry_states()]
    cache.crop(-gone)
    assert cache.get_seq_length() == 220 - gone
    for layer in own(cache):
        now, then = cache.entry_states()[layer.index], before[layer.index][..., : 220 - gone]
        assert now.shape[2] == 220 - gone
        assert ((now == then) | (now == EntryState.DROPPED)).all()
        assert ((now == EntryState.RESIDENT) <= (then == EntryState.RESIDENT)).all()
    assert step(family, cache, ids[:, 150:230]).isfinite().all()
    assert_within(cache, 1)
    cache.reset()
    assert cache.get_seq_length() == cache.resident_bytes() == cache.memory().compressed_bytes == 0


@pytest.mark.parametrize(("family", "method"), [*SOME, *LOW])
def test_ways_to_decode(family: str, method: str) -> None:
    """Greedy twice, in several turns, with beams, sampled, and with drafts that are cropped again."""
    ids, _ = padded([PROMPT])
    cache = new_cache(family, method)
    greedy = generate(family, cache, ids)
    assert torch.equal(greedy, generate(family, new_cache(family, method), ids))
    longer = generate(family, cache, torch.cat([greedy, ids[:, :30]], 1))
    assert cache.get_seq_length() == longer.shape[1] - 1
    assert_within(cache, 1)
    cache.reset()
    assert torch.equal(greedy, generate(family, cache, ids))
    for options in ({"num_beams": 3}, {"do_sample": True, "top_k": 0}):
        one, other = (generate(family, new_cache(family, method), ids, **options) for _ in range(2))
        assert torch.equal(one, other)
    drafted = new_cache(family, method)
    out = generate(family, drafted, ids[:, :130].repeat(1, 2), prompt_lookup_num_tokens=4)
    assert out.shape[1] == 260 + 12
    assert_within(drafted, 1)


@pytest.mark.parametrize("method", [*METHODS, LOWRANK])
def test_a_step_that_was_left_can_be_taken_again(method: str) -> None:
    cache = new_cache("llama", method)
    ids, _ = padded([PROMPT, PROMPT])
    step("llama", cache, ids[:, :200])
    leave_in_the_middle(cache, lambda: step("llama", cache, ids[:, 200:205]))
    assert cache.get_seq_length() == 200
    assert step("llama", cache, ids[:, 200:205]).isfinite().all()
    assert_within(cache, 2)


@pytest.mark.parametrize("method", [*METHODS, LOWRANK])
def test_a_session_goes_on_as_if_it_had_not_been_saved(method: str, tmp_path: Path) -> None:
    ids, mask = padded([PROMPT])
    cache = new_cache("llama", method)
    read("llama", cache, ids, mask, 5)
    save_session(tmp_path / "s", Session(cache, ids.tolist()))
    again = load_session(tmp_path / "s", tiny("llama")).cache
    for number in range(36):
        ours, theirs = (step("llama", each, ids[:, number : number + 1]) for each in (cache, again))
        assert torch.equal(ours, theirs)
