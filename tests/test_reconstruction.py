"""A text that is read once more: what its entries receive of that, who stays by it, and that nothing else is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import tokenizer
from families import tiny
from helpers import allocated, assert_near, bounded, counted, expected, padded, prompt, slots_of, step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import KeepCache, UsageError
from kvkeep import reconstruction as own
from kvkeep.contracts.entries import EntryState, EvictedEntries
from kvkeep.memory.meter import Meter
from kvkeep.policies.selectors.kvzip import KVzip
from kvkeep.stores.evicted.groups import GROUP


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[torch.Tensor]]]:
    """What selectors were shown of reconstructions."""
    seen: list[list[torch.Tensor]] = []
    shares = KVzip.shares

    def shown(self: KVzip, scores: Any, rows: int, entries: int) -> Any:
        seen.append([part.clone() for part in scores])
        return shares(self, scores, rows, entries)

    monkeypatch.setattr(KVzip, "shares", shown)
    yield seen


# -- scores -------------------------------------------------------------------------------------------


def slow(family: str, ids: torch.Tensor, piece: int, sinks: int) -> list[torch.Tensor]:
    """The same from transformers' own eager attention over text and repetition, one weight at a time."""
    model = deepcopy(tiny(family))
    model.set_attn_implementation("eager")
    length = ids.shape[1]
    scores: list[torch.Tensor] = []
    for start in range(0, length, piece):
        stop = min(start + piece, length)
        whole = torch.cat([ids, ids[:, max(0, start - own.CUE) : stop]], 1)
        with torch.no_grad():
            attentions = model(whole, output_attentions=True, use_cache=False).attentions
        full = [layer for layer in KeepCache(model, "full").geometry.full_layers]
        scores = scores or [torch.zeros(layer.kv_heads, length) for layer in full]
        compared = [*range(min(sinks, start)), *range(start, stop), *range(length, whole.shape[1])]
        for layer, score in zip(full, scores, strict=True):
            weights = attentions[layer.index][0]  # (heads, queries, entries)
            group = len(weights) // layer.kv_heads
            for head, of_head in enumerate(weights):
                for query in of_head[length:]:
                    among = query / query[compared].sum()
                    for slot in range(start, stop):
                        score[head // group, slot] = max(score[head // group, slot], among[slot])
    for score in scores:
        score[:, :sinks] = 1.0
    return scores


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt2"])
@pytest.mark.parametrize(("piece", "sinks"), [(2000, 4), (11, 2)])
def test_scores_are_the_most_attention_that_the_repetition_pays(
    family: str, piece: int, sinks: int, received: list[list[torch.Tensor]]
) -> None:
    ids = prompt(1, 30)
    step(family, KeepCache(tiny(family), f"kvzip:piece={piece},sinks={sinks}", 16, chunk=7), ids)
    (found,) = received
    for ours, theirs in zip(found, slow(family, ids, piece, sinks), strict=True):
        assert_near(ours, theirs)


def test_rows_are_scored_as_they_are_alone(received: list[list[torch.Tensor]]) -> None:
    lengths = [40, 33, 21]
    ids, mask = padded(lengths)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    step("llama", KeepCache(tiny("llama"), "kvzip", 16), ids, mask, position_ids=positions)
    for row, length in enumerate(lengths):
        step("llama", KeepCache(tiny("llama"), "kvzip", 16), ids[row : row + 1, 40 - length :])
    batch, *alone = received
    for row, length in enumerate(lengths):
        for together, single in zip(batch, alone[row], strict=True):
            lanes = together.unflatten(0, (3, -1))[row]
            assert_near(lanes[:, 40 - length :], single)
            assert (lanes[:, : 40 - length] == float("-inf")).all()


def test_the_model_is_told_what_to_do_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = deepcopy(tiny("llama")), tokenizer()
    model.kvkeep_tokenizer = told
    given: list[list[int]] = []
    read = own._read
    monkeypatch.setattr(
        own, "_read", lambda cache, tokens, *rest: (given.append(tokens[0].tolist()), read(cache, tokens, *rest))
    )
    ids = prompt(1, 30)
    step(model, KeepCache(model, "kvzip:piece=18", 16), ids)
    text, then = ids[0].tolist(), told.encode("<bot>", add_special_tokens=False)
    first, later = (told.encode(words, add_special_tokens=False) for words in (own.FIRST, own.LATER))
    assert given == [[*first, *then, *text[:18]], [*later, *text[10:18], *then, *text[18:]]]
    assert len(first) == 5 and len(then) == 1


# -- who stays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "entries", "least"), [(1, 16, 0.25), (2, 9, 0.5), (3, 30, 0.1), (2, 12, 1.0)])
def test_shares_go_to_the_best_of_all_heads(rows: int, entries: int, least: float) -> None:
    scores = [torch.rand(rows * heads, 25, generator=torch.Generator().manual_seed(heads)) for heads in (2, 3)]
    if rows == 3:  # a short row: what it leaves over is everybody's
        scores = [part.index_fill(0, torch.arange(len(part) // 3), float("-inf")) for part in scores]
    found = KVzip(least=least).shares(scores, rows, entries)
    if least == 1:
        assert found == [[entries], [entries]]
        return
    own_share = int(least * entries)
    for row in range(rows):
        lanes = [lane for part in scores for lane in part.unflatten(0, (rows, -1))[row].tolist()]
        ranked = sorted(((score, lane) for lane, one in enumerate(lanes) for score in one), reverse=True)
        chosen = [lane for score, lane in ranked[: (entries - own_share) * 5] if score > float("-inf")]
        spare = ((entries - own_share) * 5 - len(chosen)) // 5
        wanted = [own_share + chosen.count(lane) + spare for lane in range(5)]
        assert [*found[0][row * 2 : row * 2 + 2], *found[1][row * 3 : row * 3 + 3]] == wanted
        assert sum(wanted) <= entries * 5


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "deepseek_v3"])
@pytest.mark.parametrize("least", [0.25, 1.0])
def test_the_best_of_every_lane_stay(family: str, least: float, received: list[list[torch.Tensor]]) -> None:
    """Within the budget at every moment, in memory that exists; the checkpoint that the text was read with is gone."""
    cache = KeepCache(tiny(family), f"kvzip:least={least}", 16, chunk=10, where="host")
    room, held = 2 * 16 * cache.geometry.full_bytes_per_token, []
    cache.stream.record.tell(lambda _: held.append(sum(layer.resident_bytes for layer in bounded(cache))))
    step(family, cache, prompt(2, 47))
    assert len(held) == 5 and max(held) <= room and not cache.reading
    assert cache.budgets is not None and (least == 1) == all(len(set(own)) == 1 for own in cache.budgets)
    for layer, scores in zip(bounded(cache), received[0], strict=True):
        budgets = list(cache.budgets[layer.index]) * (1 if least < 1 else len(scores))
        for slots, budget, score in zip(slots_of(layer), budgets, scores, strict=True):
            assert sorted(slots) == sorted(score.topk(min(budget, 47)).indices.tolist())
    memory = cache.memory()
    assert memory.checkpoint_bytes == {"device": 0, "host": 0, "disk": 0} and allocated(cache) == counted(cache)
    assert sum(layer.resident_bytes for layer in bounded(cache)) <= room
    largest = max(layer.entry_elements for layer in cache.geometry.full_layers) * 4
    sliding = cache.geometry.sliding_bytes() * 2
    assert memory.peak_cache_bytes <= room + sliding + 2 * largest * 47  # a layer is there twice for a moment
    step(family, cache, prompt(2, 1))
    step(family, cache, prompt(2, 30))
    assert sum(layer.resident_bytes for layer in bounded(cache)) <= room
    assert all(set(range(77, 78)) <= set(slots) for layer in bounded(cache) for slots in slots_of(layer))


# -- when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", [0, 4])
def test_a_row_divides_its_places_as_if_it_were_alone(pin: int) -> None:
    ids, mask = padded([200, 170])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, alone = (KeepCache(tiny("llama"), "kvzip+quantize:4", 60, chunk=40, pin=pin) for _ in range(2))
    step("llama", cache, ids, mask, position_ids=positions)
    step("llama", alone, ids[1:, 30:])
    for ours, single in zip(bounded(cache), bounded(alone), strict=True):
        assert torch.equal(ours.entry_states(200, 2)[1:, :, 30:], single.entry_states(170, 1))


@pytest.mark.parametrize(("method", "budget"), [("kvzip+quantize:4,exact=0.5", 80), ("kvzip+quantize:2", 50)])
def test_what_is_kept_in_few_bits_is_the_best_of_the_rest(
    method: str, budget: int, received: list[list[torch.Tensor]]
) -> None:
    """In each lane, and in a row with padding as in the same row alone. The end of the text comes first."""
    ids, mask = padded([200, 170])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, alone = (KeepCache(tiny("llama"), method, budget, chunk=40) for _ in range(2))
    step("llama", cache, ids, mask, position_ids=positions)
    total = torch.zeros(2, dtype=torch.int64)
    for layer, scores in zip(bounded(cache), received[0], strict=True):
        resident = layer.resident.resident_slots()[:, :200]
        kept = layer.entry_states(200, 2).flatten(0, 1) > EntryState.DROPPED
        others = torch.tensor([200, 200, 170, 170]) - resident.sum(1)
        places = torch.zeros(4, dtype=torch.int64)
        for bank in layer.evicted.banks:
            lanes = torch.arange(4)[slice(None) if bank.lanes is None else bank.lanes]
            places[lanes] = bank.store.max_entries
            newest = bank.store.max_entries // 2
            assert newest < own.NEWEST and kept[lanes, -newest:].all()
            scores[lanes, -newest:] = math.inf
            slots = bank.store.slots[
                :, : bank.store.kept
            ].long()  # groups of neighbours; those with the lowest scores are dropped first
            assert ((slots.diff(dim=2) > 0) | (slots < 0)[:, :, 1:]).all()
            ranked = scores[lanes].gather(1, slots.clamp(min=0).flatten(1)).view(slots.shape)
            best = ranked.masked_fill(slots < 0, -math.inf).amax(2)
            assert (best[:, 1:] >= best[:, :-1]).all()
        assert torch.equal((kept & ~resident).sum(1), others.clamp(max=places))
        assert not kept[:2].all()
        total += places.view(2, 2).sum(1)
        for lane, score in zip(kept, scores, strict=True):
            assert lane.all() or score[lane].min() >= score[~lane].max()
    mean = bounded(cache)[0].evicted.max_entries
    assert (total <= 2 * len(bounded(cache)) * mean).all() and (total > 2 * len(bounded(cache)) * (mean - GROUP)).all()
    step("llama", alone, ids[1:, 30:])
    for ours, single in zip(bounded(cache), bounded(alone), strict=True):
        assert torch.equal(ours.entry_states(200, 2)[1:, :, 30:], single.entry_states(170, 1))


def test_a_text_within_the_budget_is_kept_until_it_grows(received: list[list[torch.Tensor]]) -> None:
    cache, ids = KeepCache(tiny("llama"), "kvzip", 32), prompt(1, 40)
    for low, high in ((0, 20), *((at, at + 1) for at in range(20, 32))):
        assert_near(step("llama", cache, ids[:, low:high])[:, -1], expected("llama", ids)[:, high - 1])
    assert cache.reading and not received
    step("llama", cache, ids[:, 32:33])
    assert not cache.reading and received[0][0].shape[1] == 33
    cache.compress()  # once is all
    assert len(received) == 1
    cache.reset()
    assert cache.reading
    cache.compress()  # of nothing
    assert cache.reading


def test_what_follows_a_context_is_not_scored(received: list[list[torch.Tensor]]) -> None:
    """A question read after the context finds the context compressed, as published: by the context alone."""
    cache, ids = KeepCache(tiny("llama"), "kvzip", 24), prompt(1, 60)
    step("llama", cache, ids[:, :48])
    step("llama", cache, ids[:, 48:])
    assert [part.shape[1] for part in received[0]] == [48] * 4 and len(received) == 1
    assert all(set(range(54, 60)) <= set(slots) for layer in bounded(cache) for slots in slots_of(layer))


def test_sinks_stay_whatever_comes_after_them() -> None:
    """All scored entries leave before those that were read later, but for the sinks, to which every token attends."""
    cache, ids = KeepCache(tiny("llama"), "kvzip:least=1,sinks=3", 16), prompt(1, 80)
    step("llama", cache, ids[:, :40])
    for at in range(40, 80):
        step("llama", cache, ids[:, at : at + 1])
    for slots in (slots for layer in bounded(cache) for slots in slots_of(layer)):
        assert set(slots) == {0, 1, 2, *range(67, 80)}


def test_interrupted_it_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, cache, other = prompt(1, 40), *(KeepCache(tiny("gemma3"), "kvzip:piece=15", 16) for _ in range(2))
    read, calls = own._read, []

    def fail(*given: Any) -> None:
        read(*given)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(own, "_read", fail)
    with pytest.raises(KeyboardInterrupt):
        step("gemma3", cache, ids)
    assert cache.reading and cache.get_seq_length() == 40
    assert all(layer.get_seq_length() == 40 for layer in bounded(cache))
    cache.compress()
    step("gemma3", other, ids)
    assert_near(*(step("gemma3", one, prompt(1, 1)) for one in (cache, other)))


def test_an_entry_that_cannot_be_handed_over_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, hand = KeepCache(tiny("llama"), "kvzip", 16), own._hand_over

    def fail(*given: Any) -> None:
        hand(*given)
        raise MemoryError

    monkeypatch.setattr(own, "_hand_over", fail)
    with pytest.raises(MemoryError):
        step("llama", cache, prompt(1, 40))
    assert cache.get_seq_length() == 0 and cache.reading and cache.memory().resident_bytes == 0


def test_what_cannot_be_repeated_is_refused_before_it_is_read() -> None:
    short = tiny("llama", positions=128)
    cache = KeepCache(short, "kvzip", 16)
    with pytest.raises(UsageError, match="100 tokens leave too few .* shorten the text to 64 tokens"):
        step(short, cache, prompt(1, 100))
    assert cache.get_seq_length() == 0
    step(short, cache, prompt(1, 64))
    assert not cache.reading
    with pytest.raises(UsageError, match="by its token ids, and embeddings have none"):
        step("llama", KeepCache(tiny("llama"), "kvzip", 16), torch.randn(1, 20, 32))


def test_rows_of_different_shares_take_the_memory_of_theirs() -> None:
    """Each row of a batch has budgets of its own, which go where the row goes; a session has them, too."""
    cache = KeepCache(tiny("llama"), "kvzip:least=0.1", 40, chunk=20)
    ids = prompt(2, 90)
    step("llama", cache, ids[:, :80])
    before = cache.shares
    assert before is not None and any(own[:2] != own[2:] for own in before)
    held = [len(slots) for layer in bounded(cache) for slots in slots_of(layer)]
    assert held == [share for own in before for share in own]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.shares == [[*own[2:], *own[:2]] for own in before]
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.shares == [own[:2] for own in before]
    cache.batch_repeat_interleave(3)
    step("llama", cache, ids[:1, 80:].repeat(3, 1))
    lanes = [[len(slots) for slots in slots_of(layer)] for layer in bounded(cache)]
    assert lanes == [own[:2] * 3 for own in before]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 110), min_size=1, max_size=4),
    st.sampled_from([(32, 128, 16), (64, 128, 32), (64, 5, 5)]),
    st.integers(0, 99),
)
def test_a_store_gets_groups_of_the_newest_and_the_best_in_each_lane(
    counts: list[int], sizes: tuple[int, int, int], seed: int
) -> None:
    """The store has a limit; of the newest slots that come first, it has a number, but at most half of the limit."""
    limit, number, first = sizes
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 40, (len(counts), 120), generator=draw) / 40  # some are equal
    slots = torch.full((len(counts), 120), -1, dtype=torch.int32)
    for lane, count in enumerate(counts):
        places, chosen = (torch.randperm(120, generator=draw)[:count] for _ in range(2))
        slots[lane, places] = chosen.int()

    def given_to_store(lanes: slice) -> list[list[list[int]]]:
        """The groups that the store gets of each lane, -1 for an empty place."""
        with patch.object(own, "NEWEST", number):
            taken = list[EvictedEntries]()
            store: Any = SimpleNamespace(max_entries=limit, take=lambda left, _: taken.append(left))
            best = own.BestEvicted(store, None, scores[lanes], Meter())
        for part in slots[lanes].split(50, 1):
            numbers = part[..., None].float()
            best.take(EvictedEntries(numbers, -numbers, part))
        nobody: Any = None  # the store does not look at resident entries
        best.give(nobody)
        if not taken:
            return [[] for _ in slots[lanes]]
        (left,) = taken
        real = left.slots >= 0
        assert torch.equal(left.keys[real][:, 0].int(), left.slots[real]) and torch.equal(left.keys, -left.values)
        return [[part.tolist() for part in lane.split(GROUP)] for lane in left.slots]

    for lane, groups in enumerate(given_to_store(slice(None))):
        score = scores[lane].tolist()
        score[-first:] = [math.inf] * first
        kept = sorted(sorted(slots[lane][slots[lane] >= 0].tolist(), key=lambda slot: (score[slot], slot))[-limit:])
        expected = [kept[at : at + GROUP] for at in range(0, len(kept), GROUP)]
        filled = [[slot for slot in group if slot >= 0] for group in groups]
        filled = [group for group in filled if group]
        assert sorted(filled) == sorted(expected)
        full = [group for group in groups if len(group) == GROUP]
        tops = [max((score[slot] for slot in group if slot >= 0), default=-1.0) for group in full]
        assert tops == sorted(tops)
        (alone,) = given_to_store(slice(lane, lane + 1))
        alone = [[slot for slot in group if slot >= 0] for group in alone]
        assert sorted(filled) == sorted(group for group in alone if group)


@pytest.mark.parametrize("method", ["kvzip+quantize:4", "kvzip+tiers"])
def test_a_text_of_padding_and_few_tokens_is_kept(method: str) -> None:
    """Though it has more slots than the budget, no entry is evicted."""
    ids, mask = padded([5, 4])
    ids, mask = (torch.nn.functional.pad(part, (123, 0)) for part in (ids, mask))
    cache = KeepCache(tiny("llama"), method, 96, chunk=40)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = step("llama", cache, ids, mask, position_ids=positions)
    for row, length in enumerate((5, 4)):
        whole = step("llama", KeepCache(tiny("llama"), "full"), ids[row : row + 1, -length:])
        assert_near(logits[row : row + 1, -length:], whole)


@pytest.mark.parametrize("method", ["kvzip", "kvzip+quantize:4", "kvzip+tiers"])
def test_one_second_reading_serves_several_budgets(method: str, received: list[list[torch.Tensor]]) -> None:
    model, ids = tiny("llama"), prompt(1, 200)
    whole = KeepCache(model, "kvzip", 200)
    step(model, whole, ids)
    attention = whole.fork(method, 100, context=200).compress()
    assert attention is not None and [one.scores.shape[1] for one in attention] == [200] * len(attention)
    passes = len(received)
    twins = [whole.fork(method, 120, context=200) for _ in range(2)]
    assert twins[0].compress(attention) is attention and twins[1].compress() is not None
    divisions = received[passes:]  # of each twin: of resident entries, and of codes where there are some
    for ours, theirs in zip(divisions[: len(divisions) // 2], divisions[len(divisions) // 2 :], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert_near(one, other)
    assert_near(*(step(model, twin, prompt(1, 4, seed=5)) for twin in twins))
    assert whole.reading and whole.get_seq_length() == 200
