"""Recurrent states and windows at a block's end: they are kept there, and a cache goes back to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import RECURRENT
from conftest import saved, tokenizer
from families import tiny
from helpers import assert_near, expected, prompt, step
from torch import Tensor

import kvkeep
from kvkeep import KeepCache, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.extent import ShapeError
from kvkeep.memory.rows import BLOCK
from kvkeep.models.loading import load
from kvkeep.transfer import copied, header, last_token_state, restore, rewind, state

LENGTH = BLOCK + 44
MOVING = (*RECURRENT, "gemma3", "gemma4")


def cache_of(family: str, method: str) -> KeepCache:
    return KeepCache(tiny(family), method, None if method == "full" else 100, chunk=None if method == "full" else 90)


def keeping(cache: KeepCache) -> dict[int, dict[str, Tensor]]:
    """States by the number of tokens, filled at every block's end that the cache comes by."""
    kept: dict[int, dict[str, Tensor]] = {}

    def keep(length: int) -> None:
        kept[length] = {name: tensor.clone() for name, tensor in last_token_state(cache).items()}

    cache.stream.on_block = keep
    return kept


@pytest.mark.parametrize("method", ["full", "kv-direct"])
@pytest.mark.parametrize("family", MOVING)
def test_a_cache_goes_back_to_a_blocks_end_and_reads_on_as_if_it_had_been_there(family: str, method: str) -> None:
    ids = prompt(1, LENGTH + 9)
    cache = cache_of(family, method)
    kept = keeping(cache)
    first = step(family, cache, ids[:, :LENGTH], logits_to_keep=0)
    assert first.shape[1] == LENGTH and [*kept] == [BLOCK]
    assert_near(first, expected(family, ids[:, :LENGTH]), 2e-3)
    for at in range(LENGTH, LENGTH + 9):
        step(family, cache, ids[:, at : at + 1])
    with pytest.raises(UsageError, match="cannot go back to"):
        rewind(cache, 2 * BLOCK, kept[BLOCK])
    rewind(cache, BLOCK, kept[BLOCK])
    assert cache.get_seq_length() == BLOCK
    other = torch.cat([ids[:, :BLOCK], ids[:, BLOCK + 9 :]], 1)
    fresh = cache_of(family, method)
    keeping(fresh)
    wanted = step(family, fresh, other, logits_to_keep=0)[:, BLOCK:]
    found = step(family, cache, other[:, BLOCK:], logits_to_keep=0)
    if method == "full":
        assert torch.equal(found, wanted)
    else:  # other entries are resident, so torch adds in another order
        assert_near(found, wanted)


@pytest.mark.parametrize("family", MOVING)
def test_a_state_restored_in_a_new_cache_goes_on_with_the_same_bits(family: str) -> None:
    ids, cache = prompt(2, 40), cache_of(family, "kv-direct")
    step(family, cache, ids[:, :30])
    given, twin = state(cache), cache_of(family, "kv-direct")
    restore(twin, set(given), lambda name: given[name].clone(), header(cache))
    assert [*state(twin)] == [*given] and all(torch.equal(one, given[name]) for name, one in state(twin).items())
    other = copied(cache)
    for low, high in ((30, 37), (37, 38), (38, 40)):
        wanted = step(family, cache, ids[:, low:high])
        for one in (twin, other):
            assert torch.equal(step(family, one, ids[:, low:high]), wanted)
    assert twin.memory().resident_bytes == cache.memory().resident_bytes


@pytest.mark.parametrize("family", RECURRENT)
def test_a_state_that_does_not_fit_is_refused(family: str) -> None:
    cache = cache_of(family, "full")
    step(family, cache, prompt(2, 30))
    given = {name: tensor.clone() for name, tensor in last_token_state(cache).items()}
    name = next(name for name in given if ".state.conv." in name)
    conv = given[name]

    def restored(changed: dict[str, Tensor], without: str = "") -> None:
        tensors = {one: tensor for one, tensor in (state(cache) | changed).items() if one != without}
        restore(cache_of(family, "full"), {*tensors}, tensors.__getitem__, header(cache))

    restored({})
    for wrong in (conv[..., :-1], conv[:, :-1], conv[:1, 0], conv.int(), conv[0, 0, 0]):
        with pytest.raises(ShapeError, match="conv.0' is|recurrent state has"):
            restored({name: wrong})
    with pytest.raises(ShapeError, match="recurrent state"):
        restored({}, without=name)
    with pytest.raises(ShapeError, match="has no tensors"):
        restored({name.replace("conv", "key"): conv})
    with pytest.raises(ShapeError, match="of 1 rows, not of 2"):
        restored({one: tensor[:1] for one, tensor in given.items()})
    with pytest.raises(ShapeError, match="no window and no recurrent state"):
        rewind(copied(cache), 10, {"layer.1.keys": conv} if family != "falcon_h1" else {"layer.9.keys": conv})


@pytest.mark.parametrize("family", ["lfm2", "gemma3"])
def test_an_answer_comes_by_block_ends_of_its_prompt_and_of_its_own(family: str) -> None:
    cache = cache_of(family, "kv-direct")
    kept = keeping(cache)
    ids = prompt(1, LENGTH)[0].tolist()
    found = kvkeep.generate(tiny(family), tokenizer(), ids, cache, max_new_tokens=4)
    plain = kvkeep.generate(tiny(family), tokenizer(), ids, cache_of(family, "kv-direct"), max_new_tokens=4)
    assert found.tokens == plain.tokens and [*kept] == [BLOCK]
    cache = cache_of(family, "kv-direct")
    kept = keeping(cache)
    kvkeep.generate(tiny(family), tokenizer(), ids[: BLOCK - 2], cache, max_new_tokens=5)
    assert [*kept] == [BLOCK]


def test_lossy_methods_are_not_cut() -> None:
    """Their answers depend on the chunks."""
    cache = KeepCache(tiny("lfm2"), "snapkv", 100, chunk=90)
    keeping(cache)
    lengths: list[int] = []
    cache.stream.on_progress = lengths.append
    step("lfm2", cache, prompt(1, LENGTH))
    assert lengths == [30, 120, 210, 300]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_cut_at_a_blocks_end_has_the_bits_of_one_that_is_not(family: str, tmp_path: Path) -> None:
    """By the native library's attention and products. transformers computes recurrent states, whose bits depend on the
    cut."""
    model = load(saved(tiny(family), tmp_path), weights="bfloat16", device="cpu").model
    ids = prompt(1, LENGTH)
    cut, plain = (KeepCache(model, "full") for _ in range(2))
    kept = keeping(cut)
    ours, theirs = (step(model, cache, ids, logits_to_keep=0) for cache in (cut, plain))
    assert [*kept] == [BLOCK] and torch.equal(ours, theirs)


@pytest.mark.parametrize("family", RECURRENT)
def test_the_bytes_of_states_are_part_of_a_budget_in_bytes(family: str) -> None:
    geometry = ModelGeometry.from_config(tiny(family).config, 4)
    fixed, each = geometry.recurrent_bytes(), geometry.full_bytes_per_token
    assert fixed
    cache = KeepCache(tiny(family), "window", f"{fixed + 20 * each}B")
    step(family, cache, prompt(1, 60))
    assert cache.entries == 20 and cache.memory().resident_bytes == fixed + 20 * each
    with pytest.raises(kvkeep.BudgetError, match=f"less than the {fixed}B that the recurrent layers hold"):
        KeepCache(tiny(family), "window", f"{fixed - 1}B")
