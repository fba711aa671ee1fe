"""Pinned entries: those of a row's first tokens are never evicted, whatever the method, and the selector has the rest
of the budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, RECURRENT, Case, new_cache, pairs
from families import tiny
from helpers import NEW, assert_near, bounded, drafted, padded, prompt, read, slots_of, step
from test_contract import assert_sound

from kvkeep import BudgetError, KeepCache, Session, UsageError, load_session, save_session
from kvkeep.policies.methods import Request, names, resolve
from kvkeep.stores.layer import Layer

PIN = 6


def pins(case: Case) -> bool:
    """Whether a cache of the case has pinned entries: it evicts entries for good, or drafts without them."""
    method = case.method.pinned(PIN)
    return method.reserved > 0 and method.refusal() is None


def pinned_cache(name: str, family: str) -> tuple[KeepCache, Case]:
    """A cache with a budget for the case and for its pinned entries, and where positions are in the cache, for copies
    of their keys."""
    case = CASES[name]
    assert case.budget is not None
    case = replace(case, budget=case.budget + 2 * PIN)
    return new_cache(name, family, budget=case.budget, pin=PIN), case


def values_of_pins(cache: KeepCache, first: list[int]) -> list[torch.Tensor]:
    """Check that every lane holds its row's pinned entries, none of which stands for another one, and the budget.
    Return their values by layer, (lanes, PIN, dim). first: the first slot of each row."""
    found = []
    for layer in bounded(cache):
        alone = layer.resident.resident_slots(unmerged=True)
        values = torch.zeros(len(alone), PIN, layer.resident.banks.banks[0].values.shape[-1])
        for lane, own in enumerate(alone):
            start = first[lane // layer.heads]
            assert own[start : start + PIN].all()
        for bank in layer.resident.banks:
            lanes = range(len(bank.slots)) if bank.lanes is None else bank.lanes.tolist()
            for number, lane in enumerate(lanes):
                start = first[lane // layer.heads]
                for place in range(min(PIN, layer.length - start)):
                    values[lane, place] = bank.values[number, (bank.slots[number] == start + place).nonzero().item()]
        found.append(values)
    return found


@pytest.mark.turns(4)
@pytest.mark.parametrize(("name", "family"), pairs(10, pins, everywhere=("h2o", "streaming-llm")))
def test_pinned_entries_stay_as_they_are(name: str, family: str, tmp_path: Path) -> None:
    """In a padded batch, whose rows are reordered, cropped, copied and saved, while the budget holds."""
    cache, case = pinned_cache(name, family)
    ids, mask = padded([case.length + NEW, case.length - (case.chunk or 16)])
    first = (mask == 0).sum(1).tolist()
    cache.stream.record.tell(lambda length: None if cache.reading else assert_sound(cache, case))
    read(family, cache, ids, mask)
    before = values_of_pins(cache, first)
    order = torch.tensor([1, 0, 1])
    cache.reorder_cache(order)
    first = [first[row] for row in order]
    tokens = prompt(3, 30, seed=7)

    def read_more(own: Any, low: int, high: int) -> torch.Tensor:
        slots = torch.arange(own.get_seq_length() + high - low)
        return step(family, own, tokens[:, low:high], (slots >= torch.tensor(first)[:, None]).long())

    for low, high in ((0, 13), (13, 14), (14, 15)):
        read_more(cache, low, high)
    if family not in RECURRENT and not any(cache.is_sliding) and cache.positions is None:
        cache.crop(-3)
        read_more(cache, 15, 18)
    save_session(tmp_path / "s", Session(cache, [[1] * cache.get_seq_length()] * 3))
    others = [cache, cache.fork(), load_session(tmp_path / "s", tiny(family)).cache]
    logits = [[read_more(own, low, high) for low, high in ((18, 27), (27, 28))] for own in others]
    for own, found in zip(others, logits, strict=True):
        assert own.method.pin == PIN
        for now, then in zip(values_of_pins(own, first), before, strict=True):
            lanes = (order[:, None] * (len(then) // 2) + torch.arange(len(then) // 2)).flatten()
            assert torch.equal(now, then[lanes])
        assert_near(torch.cat(found, 1), torch.cat(logits[0], 1), 1e-5)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("name", "family"), pairs(11, lambda case: pins(case) and not case.drafts))
def test_the_pin_of_nothing_changes_no_bit(name: str, family: str) -> None:
    case = CASES[name]
    ids = prompt(2, case.length)
    one, other = new_cache(name, family), new_cache(name, family, pin=0)
    assert one.request == other.request and "pin" not in one.request.options()
    assert torch.equal(read(family, one, ids), read(family, other, ids))


@pytest.mark.parametrize("method", ["full", "kv-direct", "h2o+checkpoint:kv", "window+checkpoint:residual"])
def test_an_exact_method_takes_a_pin_and_does_not_need_it(method: str) -> None:
    budget = None if method == "full" else 16
    assert Request.parse(method, budget, pin=PIN) == Request.parse(method, budget)


@pytest.mark.parametrize(
    ("method", "budget"),
    [("h2o", 20), ("streaming-llm", 29), ("snapkv+verified", 32), ("quantized", 100), ("pyramidkv", 20), ("kvzip", 20)],
)
def test_pins_that_leave_no_room_are_refused_before_anything_is_read(method: str, budget: int) -> None:
    with pytest.raises(BudgetError, match=r"^(20|100) pinned tokens leave no room for others in a budget of"):
        KeepCache(tiny("llama"), method, budget, pin=100 if method == "quantized" else 20)
    with pytest.raises(BudgetError, match="^Beside 60 pinned tokens: A budget of 4 entries is too small"):
        KeepCache(tiny("llama"), "quantized", 64, pin=60)


def test_wrong_pins_are_refused_in_a_sentence() -> None:
    for wrong in (-1, True, "4", 1.5, 2**31, None):
        with pytest.raises(UsageError, match="must be a number of first tokens"):
            Request.parse("h2o", 16, pin=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot pin 2000 tokens. It recalls 16 passages of 128 tokens, so it can pin"):
        Request.parse("endless", 256, pin=2000)


def test_every_method_pins_or_says_why_not() -> None:
    assert {name for name in names() if resolve(name).pinned(200).refusal() is not None} <= {"attention-matching"}


@pytest.mark.parametrize(("name", "newest"), [("window", 16), ("h2o:recent=1", 16), ("h2o:recent=0.5", 8)])
def test_a_selector_has_the_rest_of_the_budget(name: str, newest: int) -> None:
    """Also if it would keep that all, and while decoded tokens evict one entry each."""
    model, ids = tiny("llama"), prompt(1, 50)
    cache = KeepCache(model, name, 16 + PIN, chunk=16, pin=PIN)
    read(model, cache, ids, single=12)
    for layer in bounded(cache):
        flags = layer.resident.resident_slots()
        assert (flags.sum(1) == 16 + PIN).all() and flags[:, :PIN].all() and flags[:, -newest:].all()


@pytest.mark.parametrize("name", ["h2o", "window", "snapkv", "kvzip"])
def test_tokens_of_a_pinned_cache_are_planned_as_without_pins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, which evicts the entry that the plain operations would evict."""
    model, ids, planned, plan = tiny("llama"), prompt(1, 50), list[bool](), Layer.plan

    def noting(*given: Any) -> Any:
        found = plan(*given)
        planned.append(found is not None)
        return found

    cache, other = (KeepCache(model, name, 16 + PIN, chunk=16, pin=PIN) for _ in range(2))
    monkeypatch.setattr(Layer, "plan", noting)
    logits = read(model, cache, ids, single=12)
    assert planned[-12 * 4 :] == [True] * 12 * 4
    monkeypatch.setattr(Layer, "plan", lambda *_: None)
    assert_near(read(model, other, ids, single=12), logits)
    for one, two in zip(bounded(cache), bounded(other), strict=True):
        assert [set(slots) for slots in slots_of(one)] == [set(slots) for slots in slots_of(two)]


@pytest.mark.parametrize("name", ["snapkv:window=4,kernel=3+verified:5", "adakv:window=4,kernel=3+verified:4"])
def test_drafts_are_written_with_pinned_entries_and_answers_are_exact(name: str) -> None:
    model, ids = tiny("llama"), prompt(1, 60)
    cache = KeepCache(model, name, 40, checkpoint="kv", where="host", pin=PIN)
    answer = drafted(model, cache, ids, 20)
    assert answer.tokens == drafted(model, KeepCache(model), ids, 20).tokens and answer.drafted
    for layer in bounded(cache):
        flags = layer.resident.resident_slots()
        assert flags[:, :PIN].all() and not flags.all()


def test_a_cache_is_pinned_before_it_reads() -> None:
    model, ids = tiny("llama"), prompt(1, 40)
    cache = KeepCache(model, "h2o", 16 + PIN)
    cache.pin(PIN)
    assert cache.method.pin == PIN and "pin=6" in repr(cache)
    with pytest.raises(BudgetError, match="40 pinned tokens leave no room"):
        cache.pin(40)
    assert cache.method.pin == PIN == cache.request.method.pin
    step(model, cache, ids)
    with pytest.raises(UsageError, match="has read a text without these pins; call reset"):
        cache.pin(3)
    cache.reset()
    assert cache.method.pin == PIN
    cache.pin(0)
    assert cache.request == Request.parse("h2o", 16 + PIN)
