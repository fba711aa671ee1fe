"""Recurrent states and windows at a block's end: they are kept there, and a cache goes back to them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import RECURRENT
from conftest import saved, tokenizer
from families import FAMILIES, HYBRIDS, tiny
from helpers import assert_near, assert_same, drafted, expected, generate, padded, prompt, step, stock
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvkeep
from kvkeep import KeepCache, UnsupportedModelError, UsageError
from kvkeep.blocks import beginnings
from kvkeep.decode.cached_text import CachedText
from kvkeep.engine.batch import can_pack
from kvkeep.engine.drafts import PassPrices, expect_drafts, take_back
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.extent import ShapeError
from kvkeep.memory.rows import BLOCK
from kvkeep.models.binding import bind
from kvkeep.models.loading import load
from kvkeep.transfer import copied, header, last_token_state, restore, rewind, state

LENGTH = BLOCK + 44
MOVING = (*RECURRENT, "gemma3", "gemma4")


def cache_of(family: str, method: str) -> KeepCache:
    return KeepCache(tiny(family), method, None if method == "full" else 100, chunk=None if method == "full" else 90)


def without_experts(family: str) -> Any:
    """The tiny model of a family; Qwen3-Next with dense layers, because torch multiplies experts."""
    if family != "qwen3_next":
        return tiny(family)
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.mlp_only_layers = [*range(config.num_hidden_layers)]
    return AutoModelForCausalLM.from_config(config).float().eval()


def keeping(cache: KeepCache) -> dict[int, dict[str, Tensor]]:
    """States by the number of tokens, filled at every block's end that the cache comes by."""
    kept: dict[int, dict[str, Tensor]] = {}

    def keep(length: int) -> None:
        kept[length] = {name: tensor.clone() for name, tensor in last_token_state(cache).items()}

    cache.stream.record.tell(on_block=keep)
    return kept


@pytest.mark.turns(3)
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
def test_a_text_goes_back_to_no_block_end_of_other_rows_or_with_discarded_entries(family: str) -> None:
    for change in ("rows", "capacity"):
        ids = prompt(2 if change == "rows" else 1, LENGTH + 100)
        capacity = None if change == "rows" else 100
        cache = KeepCache(tiny(family), "kv-direct", 64, chunk=32, checkpoint="kv", where="host", capacity=capacity)
        beginnings.watch(cache, 0, BLOCK)
        step(family, cache, ids[:, :LENGTH])
        assert [*cache.stream.record.ends] == [BLOCK]
        step(family, cache, ids[:, LENGTH:])
        if change == "rows":
            cache.reorder_cache(torch.tensor([1, 0]))
        text = CachedText(cache, ids[-1].tolist())
        text.align(ids[-1, : LENGTH - 10].tolist())
        assert cache.get_seq_length() == 0


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


@pytest.mark.turns(4)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("method", ["full", "snapkv+verified:5"])
@pytest.mark.parametrize("family", RECURRENT)
def test_drafts_write_what_single_steps_write_to_the_bit(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the native library's products: tokens, logits, and in the end the states."""
    monkeypatch.setattr(PassPrices, "of", lambda self, rows: 1 + 0.05 * rows)  # every copy is worth a try
    monkeypatch.setattr("kvkeep.engine.drafts.GRAM", 1)
    model, ids = load(saved(without_experts(family), tmp_path), weights="bfloat16", device="cpu").model, prompt(1, 45)
    ids = torch.cat([ids, ids[:, :20], ids], 1)
    budget = {} if method == "full" else {"budget": 24, "chunk": 128, "checkpoint": "kv"}
    wanted, found = (
        drafted(model, KeepCache(model, name, **given), ids, 40, copies=copies)
        for name, given, copies in (("full", {}, False), (method, budget, True))
    )
    assert not wanted.drafted and found.drafted > 0 and found.accepted < found.drafted
    assert found.tokens == wanted.tokens
    assert torch.equal(torch.cat(found.logits), torch.cat(wanted.logits))
    for index, held in found.cache.made.states.items():
        ours, theirs = held.state(), wanted.cache.made.states[index].state()
        assert not held.noted and not held.record_past
        assert [*ours] == [*theirs] and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", HYBRIDS)
def test_other_families_are_exact_with_padding(family: str) -> None:
    """Prompts are read at once: transformers' own cache changes Jamba's logits by a hundredth in chunks."""
    ids, mask = padded([45, 38])
    wanted = generate(family, stock(family), ids, mask)
    for method in ("full", "kv-direct", "h2o+verified:3"):
        budget, chunk = (None, None) if method == "full" else (20, 64)
        cache = KeepCache(tiny(family), method, budget, chunk=chunk)
        found = generate(family, cache, ids, mask)
        assert_same(found, wanted)
        assert can_pack(cache) and all(report.note for report in cache.describe() if report.kind != "full")
    cache = KeepCache(tiny(family), "h2o", 20, chunk=16)
    assert torch.stack(generate(family, cache, ids, mask).logits).isfinite().all()
    fixed, entries = cache.geometry.recurrent_bytes(), 20 * cache.geometry.full_bytes_per_token
    assert cache.memory().resident_bytes == 2 * (fixed + entries)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
@pytest.mark.usefixtures("kernels")
def test_what_a_caller_records_survives_drafts_and_copies(family: str, packed: bool, tmp_path: Path) -> None:
    """And a copy may be cropped as far as the cache."""
    model, ids = tiny(family), prompt(1, 60)
    if packed:
        model = load(saved(model, tmp_path), weights="bfloat16", device="cpu").model
    cache, twin = KeepCache(model), KeepCache(model)
    for one in (cache, twin):
        step(model, one, ids[:, :40])
    cache.activate_past_recording()
    step(model, cache, ids[:, 40:44])
    for _ in range(2):
        expect_drafts(cache)
        step(model, cache, ids[:, 44:50])
        take_back(cache, 6)
    wanted = step(model, twin, ids[:, 40:41])
    for one in (cache.fork(), copy.deepcopy(cache), cache.fork("kv-direct", 24, checkpoint="kv"), cache):
        one.crop(-4)
        assert_near(step(model, one, ids[:, 40:41]), wanted)


def test_drafts_leave_nothing_recorded() -> None:
    cache, ids = KeepCache(tiny("gemma3")), prompt(1, 200)
    step("gemma3", cache, ids[:, :40])
    held = cache.memory().resident_bytes
    expect_drafts(cache)
    step("gemma3", cache, ids[:, 40:140])
    take_back(cache, 100)
    assert cache.memory().resident_bytes <= held + cache.geometry.full_bytes_per_token * 256
    assert not any(cache.is_recording_past(layer) for layer in range(len(cache.layers)))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)


def test_a_convolution_goes_back_no_further_than_it_recorded() -> None:
    cache, twin, ids = KeepCache(tiny("lfm2")), KeepCache(tiny("lfm2")), prompt(1, 45)
    for one in (cache, twin):
        step("lfm2", one, ids[:, :40])
    cache.activate_past_recording()
    step("lfm2", cache, ids[:, 40:42])
    with pytest.raises(UsageError, match="state cannot go back"):
        cache.crop(-3)
    cache.crop(-2)
    assert_near(step("lfm2", cache, ids[:, 40:42]), step("lfm2", twin, ids[:, 40:42]))


@pytest.mark.parametrize("family", RECURRENT)
def test_tokens_are_taken_back_as_far_as_states_were_noted(family: str) -> None:
    model, ids = tiny(family), prompt(1, 45)
    cache, twin = (KeepCache(model, "h2o+verified:5", 20, checkpoint="kv") for _ in range(2))
    for one in (cache, twin):
        step(family, one, ids[:, :40])
    before, held = cache.get_seq_length(), cache.memory().resident_bytes
    expect_drafts(cache)
    step(family, cache, torch.cat([ids[:, 40:42], ids[:, :3]], 1))
    assert cache.memory().resident_bytes == held + 5 * cache.geometry.recurrent_bytes()
    take_back(cache, 3)
    assert cache.get_seq_length() == before + 2 and cache.memory().resident_bytes == held
    with pytest.raises(UsageError, match="state cannot go back"):
        cache.crop(-1)
    step(family, twin, ids[:, 40:41])
    step(family, twin, ids[:, 41:42])
    assert_near(step(family, cache, ids[:, 42:]), step(family, twin, ids[:, 42:]))


def test_drafts_are_refused_where_a_recurrent_module_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind(tiny("bamba")), "recurrent", {})
    with pytest.raises(UnsupportedModelError, match="'bamba' has recurrent layers, and kvkeep does not find"):
        KeepCache(tiny("bamba"), "h2o+verified", 20)
    KeepCache(tiny("bamba"), "h2o", 20)


@pytest.mark.parametrize("family", RECURRENT)
def test_the_bytes_of_states_are_part_of_a_budget_in_bytes(family: str) -> None:
    geometry = ModelGeometry.from_config(tiny(family).config, 4)
    fixed, each = geometry.recurrent_bytes(), geometry.full_bytes_per_token
    assert fixed
    cache = KeepCache(tiny(family), "window", f"{fixed + 20 * each}B")
    step(family, cache, prompt(1, 60))
    assert cache.entries == 20 and cache.memory().resident_bytes == fixed + 20 * each
    drafting = KeepCache(tiny(family), "h2o+verified:5", f"{7 * fixed + 20 * each}B")  # six tokens may wait
    assert drafting.entries == 20
    with pytest.raises(kvkeep.BudgetError, match=f"less than the {fixed}B that the recurrent layers hold"):
        KeepCache(tiny(family), "window", f"{fixed - 1}B")
