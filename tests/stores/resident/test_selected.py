"""Layers whose entries a selector chooses: what it learns of attention, and what rows of a batch take of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import LOSSY, UNLIKE, Case, new_cache
from families import tiny
from helpers import NEW, assert_near, bounded, generate, padded, prompt, slots_of, step
from test_contract import watched

from kvkeep import EntryState, KeepCache, UsageError
from kvkeep.stores.layer import Layer


def chosen(case: Case) -> bool:
    """Whether a budget is that of resident entries alone, of which many a prompt fills."""
    return not case.equals and case.length == 45 and "sketch" not in case.spec and "kvreviver" not in case.spec


CHOSEN = [name for name, case in LOSSY.items() if chosen(case)]
BY_HEAD = ("duo-attention", "kvzip", "adakv", "epicache", "kvgrad")  # whose heads have different budgets
DROPPING = [name for name in CHOSEN if "+" not in name and LOSSY[name].promise == "lossy" and name not in BY_HEAD]
BY_VECTORS = [  # which need no ids
    name
    for name in CHOSEN
    if "merge" not in name
    and LOSSY[name].alone
    and LOSSY[name].method.reading is None
    and LOSSY[name].method.recall.hook() is None
]


# -- what a selector learns -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", UNLIKE)
def test_a_token_that_took_anothers_place_keeps_what_it_received(family: str) -> None:
    """The first attention a decoded token gets is its own; it counts whether the token was appended or replaced one."""
    for budget in (42, 44):  # full after the prompt, and with room for two more
        cache = new_cache("h2o", family, budget=budget, chunk=42)
        for low, high in ((0, 42), (42, 43)):
            step(family, cache, prompt(1)[:, low:high])
        for layer in bounded(cache):
            (bank,) = layer.resident.banks
            assert (bank.scores[bank.slots == 42] > 0).all()


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_row_that_was_padded_attends_as_many_entries_as_one_that_was_not(name: str) -> None:
    """A decoded token takes its place before it attends, in padded batches too: the budget includes it."""
    cache = new_cache(name, "llama")
    ids, mask = padded([45, 30])
    step("llama", cache, ids, mask)
    attended: list[tuple[int, int]] = []
    for layer in bounded(cache):
        own: Callable[..., Iterator[Any]] = layer.resident.pieces

        def pieces(*given: Any, own: Callable[..., Iterator[Any]] = own, layer: Layer = layer) -> Iterator[Any]:
            assert layer.pending is None  # settled before it is attended
            for piece in own(*given):
                attended.append((layer.index, piece.keys.shape[2]))
                yield piece

        layer.resident.pieces = pieces
    step("llama", cache, ids[:, :1], torch.cat([mask, mask.new_ones(2, 1)], 1))
    slack = max(getattr(layer.evicted, "slack", 1) - 1 for layer in bounded(cache))
    assert attended
    for index, count in attended:
        assert min(cache.budgets[index]) - slack <= count <= max(cache.budgets[index])


@pytest.mark.parametrize("name", LOSSY)
def test_a_budget_of_nothing_is_refused_or_works(name: str) -> None:
    """With nothing recalled, not even the token in hand would be attended."""
    try:
        cache = new_cache(name, "llama", budget=0, chunk=7)
    except UsageError as error:
        assert "budget" in str(error).lower() and str(error).endswith(".")
        return
    assert LOSSY[name].promise == "reversible"
    assert all(logits.isfinite().all() for logits in generate("llama", cache, prompt()).logits)


def test_rows_of_a_batch_break_ties_alike() -> None:
    """Estimates that tie exactly: equal rows stay equal, whatever else is in the batch."""
    ids = prompt(1, 60)
    others = torch.cat([ids, prompt(1, 60, seed=8), ids])
    shrunk = "estimate=shrunk,by=mean,keys=signed"
    for spec in ("tova+sketch:swap=1", f"tova+sketch-variants:swap=1,{shrunk}", "snapkv:window=4+sketch:swap=1"):
        cache = KeepCache(tiny("llama"), spec, 24, chunk=16)
        for low, high in ((0, 48), *((at, at + 1) for at in range(48, 60))):
            step("llama", cache, others[:, low:high])
            for layer in bounded(cache):
                lanes = [sorted(slots) for slots in slots_of(layer)]
                assert lanes[: layer.heads] == lanes[2 * layer.heads :], spec


@pytest.mark.parametrize("name", ["tova", "h2o", "knorm"])
def test_of_entries_that_rank_alike_the_oldest_leaves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a bank they lie: after a crop and new tokens, banks of two readers are in another order."""
    cache = new_cache(name, "llama")
    selector = type(cache.method.selector)
    monkeypatch.setattr(selector, "rank", lambda self, entries: torch.zeros_like(entries.slots, dtype=torch.float32))
    monkeypatch.setattr(selector, "may_tie", True)
    ids = prompt(2, 60)
    step("llama", cache, ids[:, :20])
    cache.crop(-9)
    for low, high in ((11, 31), (31, 32), (32, 50), (50, 51)):
        step("llama", cache, ids[:, low:high])
    for layer in bounded(cache):
        assert all(sorted(slots) == [*range(35, 51)] for slots in slots_of(layer))


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", DROPPING)
def test_rows_allocate_what_they_need(name: str) -> None:
    """Row by row, in blocks of 128 columns up to the budget: hand-computed for 300 tokens beside 20."""
    ids, mask = padded([300, 20])
    cache = new_cache(name, "llama", budget=256, chunk=64)
    entry = 2 * 2 * 8 * 4  # keys and values, two heads of 8 floats
    step("llama", cache, ids, mask)
    budgets = [own for (own,) in cache.budgets or ()]
    sinks = 3 * 2 * 8 * 4 * len(budgets) if name == "streaming-llm" else 0  # as they came, of the long row alone
    both = sum(min(own, 384) + min(own, 128) for own in budgets) * entry
    assert both <= cache.memory().resident_bytes <= both + 2 * sinks
    if name == "pyramidkv":
        assert budgets == sorted(budgets, reverse=True) and budgets[0] > 256 > budgets[-1]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert both <= cache.memory().resident_bytes <= both + 2 * sinks
    cache.batch_select_indices(torch.tensor([0]))  # the short row
    short = sum(min(own, 128) for own in budgets) * entry
    assert short <= cache.memory().resident_bytes <= short + 2 * sinks
    step("llama", cache, ids[:1, :1], torch.cat([mask[1:], mask.new_ones(1, 1)], 1))
    for layer, own in zip(bounded(cache), budgets, strict=True):
        assert [len(slots) for slots in slots_of(layer)] == [min(own, 21)] * 2


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", BY_VECTORS)
def test_ragged_rows_are_what_they_are_alone(name: str) -> None:
    """Rows in banks of their own, that grow at different times, give what each gives without the others."""
    inputs = torch.randn(3, 300 + NEW, 32, generator=torch.Generator().manual_seed(0))
    if LOSSY[name].gradients:  # of a loss, which is of token ids
        inputs = prompt(3, 300 + NEW)
    mask = torch.ones(3, 300 + NEW, dtype=torch.long)
    lengths = [300, 236, 44]  # padded by whole chunks
    for row, length in enumerate(lengths):
        mask[row, : 300 - length] = 0

    def outputs(rows: slice, start: int, checked: bool = False) -> torch.Tensor:
        cache, logits = new_cache(name, "llama", budget=256, chunk=64), []
        if checked:
            watched(cache, Case(LOSSY[name].spec, 256))
        places = (mask[rows, start:].cumsum(1) - 1).clamp(min=0)
        for low, high in ((start, 300), *((at, at + 1) for at in range(300, 300 + NEW))):
            given = {"position_ids": places[:, low - start : high - start]}
            logits.append(step("llama", cache, inputs[rows, low:high], mask[rows, start:high], **given))
        return torch.cat(logits, 1)

    batch = outputs(slice(None), 0, checked=True)
    for row, length in enumerate(lengths[1:], 1):
        own = slice(row, row + 1)
        assert_near(batch[own], outputs(own, 0 if LOSSY[name].alone == "padded" else 300 - length))


@pytest.mark.parametrize("family", UNLIKE)
def test_pyramidkv_allocates_less_with_depth_and_says_so(family: str) -> None:
    cache = new_cache("pyramidkv", family, budget=40)
    step(family, cache, prompt(2, 100))
    layers, held = bounded(cache), []
    for layer in layers:
        own = cache.geometry.layers[layer.index]
        held.append(layer.resident_bytes // (2 * layer.heads * 4 * (own.key_dim + own.value_dim)))
    mean, least = 40 - 4, (40 - 4) / 20
    shares = [depth / (len(layers) - 1) if len(layers) > 1 else 0.5 for depth in range(len(layers))]
    assert held == [4 + int(2 * mean - least + (2 * least - 2 * mean) * share) for share in shares]
    assert [report.entries for report in cache.describe() if report.kind == "full"] == held


def test_heads_divide_the_budget_of_their_layer_again_for_each_chunk() -> None:
    """Each row has all of it, at every moment; the division goes where the row goes, and into a fork."""
    cache, ids = KeepCache(tiny("llama"), "adakv:window=4,kernel=3", 40, chunk=20), prompt(2, 90)
    step("llama", cache, ids[:, :40])
    assert cache.shares == [[40]] * 4
    divided = []
    for low, high in ((40, 60), (60, 80), (80, 81)):
        step("llama", cache, ids[:, low:high])
        assert cache.shares is not None
        divided.append(cache.shares)
        held = [len(slots) for layer in bounded(cache) for slots in slots_of(layer)]
        assert held == [share for own in cache.shares for share in own]
        assert all(sum(own[:2]) == sum(own[2:]) == 80 and min(own) >= 4 + 0.2 * 36 for own in cache.shares)
    assert divided[0] != divided[1] == divided[2]
    twin = cache.fork()
    assert twin.shares == cache.shares
    for one in (cache, twin):
        one.reorder_cache(torch.tensor([1, 0]))
        assert one.shares == [[*own[2:], *own[:2]] for own in divided[2]]
    assert torch.equal(*(step("llama", one, ids[:, 60:80]) for one in (cache, twin)))
    assert cache.shares == twin.shares
    cache.reset()
    assert cache.shares == [[40]] * 4


def test_what_a_division_evicts_is_stored() -> None:
    cache = KeepCache(tiny("llama"), "adakv:window=4,kernel=3+quantize:8", 120, chunk=32)
    step("llama", cache, prompt(1, 170))
    assert cache.shares is not None and any(own[0] != own[1] for own in cache.shares)
    states = torch.stack(cache.entry_states())
    stored = (states == EntryState.QUANTISED) | (states == EntryState.RESIDENT)
    assert stored.float().mean() > 0.7  # a lane that evicts less than another leaves places of a group empty
    held = sum(layer.resident_bytes for layer in bounded(cache)) + cache.memory().compressed_bytes
    assert held <= 120 * cache.geometry.full_bytes_per_token


def test_an_entry_that_comes_back_changes_no_score_of_another_head() -> None:
    """tova gives all KV heads of a row one and the same scores."""
    cache = KeepCache(tiny("llama"), "tova+pages:1", 16, chunk=16, checkpoint="kv", where="host")
    ids = prompt(1, 41)
    for tokens in ids.split(40, 1):
        step("llama", cache, tokens)
    layer = bounded(cache)[0]
    (bank,) = layer.resident.banks
    before, gone = bank.scores.clone(), min({*range(41)} - {*bank.slots[0].tolist()})
    assert (before > 0).all()
    layer.resident.swap_in(torch.tensor([[gone], [-1]]), bank.keys[:, :1] * 0, bank.values[:, :1] * 0)
    assert gone in bank.slots[0].tolist() and gone not in bank.slots[1].tolist()
    assert torch.equal(bank.scores[1], before[1]) and int((bank.scores[0] == 0).sum()) == 1
