"""Merged neighbours: held against a cache in plain loops, with unrotated keys; and what always holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCABULARY, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep.policies.fates.dropped import Drop
from kvkeep.policies.merging import MERGING
from kvkeep.policies.merging.kvslimmer import KVSlimmer
from kvkeep.stores.merged import MergedLayer, slack_of
from kvkeep.stores.pairing import cheapest_pairs
from kvkeep.stores.parts import Parts
from kvkeep.stores.streamed import Step
from transformers import DynamicCache

from kvkeep import EntryState, KeepCache, UnsupportedModelError, UsageError
from kvkeep.decode.session import Session, load_session, save_session
from kvkeep.errors import BudgetError
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.memory.places import Device
from kvkeep.policies.selectors.h2o import H2O

INF = float("inf")


# -- pairs --------------------------------------------------------------------------------------------


def greedy(cost: list[float], wanted: int) -> list[int]:
    taken: list[int] = []
    for place in sorted(range(len(cost)), key=lambda place: (cost[place], place)):
        if cost[place] < INF and len(taken) < wanted and not {place - 1, place, place + 1} & set(taken):
            taken.append(place)
    return sorted(taken)


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, INF]), min_size=9, max_size=9), min_size=1, max_size=4
    ),
    wanted=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_pairs_are_greedys(rows: list[list[float]], wanted: int) -> None:
    chosen = cheapest_pairs(torch.tensor(rows), torch.full((len(rows), 1), wanted))
    assert [flags.nonzero().flatten().tolist() for flags in chosen] == [greedy(row, wanted) for row in rows]


def test_pairs_never_overlap_even_where_costs_only_fall() -> None:
    chosen = cheapest_pairs(torch.arange(300.0).flip(0)[None], torch.tensor([[300]]))
    assert not (chosen[:, 1:] & chosen[:, :-1]).any()
    assert chosen.sum() >= 12


# -- a layer, step by step ----------------------------------------------------------------------------


@dataclass
class Entry:
    """Of the reference: a key as at position 0, the sum of values, tokens, weight, and when it came."""

    key: torch.Tensor
    value: torch.Tensor
    count: float
    slot: int
    weight: float = 0.0


class Reference:
    """One lane in plain loops: positions are running sums of counts, keys are turned afresh for every query."""

    def __init__(self, adapter: Any, budget: int, sinks: int, cap: int, slack: int, scaling: float) -> None:
        self.adapter, self.budget, self.sinks, self.cap, self.slack = adapter, budget, sinks, cap, slack
        self.scaling, self.entries, self.length, self.since = scaling, [], 0, 0
        self.output, self.queries, self.due = torch.zeros(8), 0, 0

    def forget(self) -> None:
        """Of what was heard before the last merging, when more is about to be heard."""
        if self.due:
            self.since, self.due, self.output, self.queries = self.due, 0, torch.zeros(8), 0
            for entry in self.entries:
                entry.weight = 0.0

    def turned(self, key: torch.Tensor, by: float) -> torch.Tensor:
        key = key[None, None, None]
        return self.adapter.turn(0, key, self.adapter.angles(0, key, torch.tensor([[int(by)]])))[0, 0, 0]

    def ask(self, query: torch.Tensor, slot: int, entries: list[Entry], end: float) -> torch.Tensor:
        """query (heads, dim), rotated at ``slot``; entries end at position ``end`` = slots in all."""
        scores, place = [], end
        for entry in reversed(entries):
            place -= entry.count
            scores.append(query @ self.turned(entry.key, place) * self.scaling + torch.tensor(entry.count).log())
        weights = torch.stack(scores[::-1], 1).softmax(1)  # (heads, entries)
        for entry, weight in zip(entries, weights.mean(0), strict=True):
            entry.weight += float(weight)
        values = torch.stack([entry.value / entry.count for entry in entries])
        output = weights @ values
        self.output, self.queries = self.output + output.mean(0), self.queries + 1
        return output

    def take(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """queries (heads, n, dim) rotated, keys and values (n, dim), keys not rotated."""
        new = [Entry(key, value, 1, self.length + n) for n, (key, value) in enumerate(zip(keys, values, strict=True))]
        single = len(new) == 1
        if single:
            self.settle(new, self.length)
        self.forget()
        outputs = []
        for number in range(len(new)):
            slot = self.length + number
            seen = self.entries if single else self.entries + new[: number + 1]
            outputs.append(self.ask(queries[:, number], slot, seen, slot + 1))
        if not single:
            self.settle(new, self.length + len(new))
        self.length += len(new)
        return torch.stack(outputs, 1)

    def settle(self, new: list[Entry], end: int) -> None:
        entries = self.entries + new
        excess = len(entries) - self.budget
        if excess > 0:
            excess = max(excess, self.slack)
            weights = {id(entry): entry.weight / max(1, end - max(entry.slot, self.since)) for entry in entries}
            while excess:
                cost = [
                    INF if a.slot < self.sinks or end <= max(b.slot, self.since) else weights[id(a)] + weights[id(b)]
                    for a, b in itertools.pairwise(entries)
                ]
                pairs = greedy(cost, excess)
                excess -= len(pairs)
                for place in reversed(pairs):
                    entries[place : place + 2] = [self.merge(*entries[place : place + 2], weights)]
            for entry in entries:
                entry.weight = weights[id(entry)] * (end - max(entry.slot, self.since))
            self.due = end
        self.entries = entries

    def merge(self, one: Entry, two: Entry, weights: dict[int, float]) -> Entry:
        a, b, mean = weights[id(one)], weights[id(two)], self.output / self.queries
        v, w = one.value / one.count - mean, two.value / two.count - mean
        c11, c22, c12 = (a * (1 - 2 * a) * v).norm(), (b * (1 - 2 * b) * w).norm(), (a * b * (v + w)).norm()
        share = ((c11 - c12) / (c11 - 2 * c12 + c22)).clamp(0, 1)
        # Keys are as at 0; the second is further on by the first's count, and that is the place of both.
        key = share * one.key + (1 - share) * self.turned(two.key, 0)
        count = one.count + two.count
        merged = Entry(key, one.value + two.value, min(count, self.cap) if self.cap else count, two.slot)
        weights[id(merged)] = a + b
        self.kept = [*getattr(self, "kept", []), one, two]  # so that ids stay theirs
        return merged


def layer_of(merging: Any, budget: int) -> tuple[MergedLayer, Any]:
    from kvkeep.models.binding import bind

    adapter, ledger, meter = bind(tiny("llama")), Ledger(False), Meter()
    live = Drop().build(None, ledger, meter)  # type: ignore[arg-type]
    home = Device(torch.device("cpu"))
    return MergedLayer(Parts(0, (budget,), H2O(), live, home, ledger, meter), merging, adapter), adapter


@pytest.mark.parametrize("cap", [0, 3])
@pytest.mark.parametrize("chunks", [[20, *[1] * 30], [9, 16, 16, 5, 1, 1, 16, 1, 1, 1, 3, *[1] * 12]])
def test_equals_merging_in_plain_loops(cap: int, chunks: list[int]) -> None:
    """In a layer of one KV head with two query heads; unrotated keys, turned afresh for every query."""
    generator = torch.Generator().manual_seed(3)
    merging, budget, scaling = KVSlimmer(sinks=3, cap=cap, slack=4), 20, 0.7
    layer, adapter = layer_of(merging, budget)
    assert layer.slack == 4
    reference, done = Reference(adapter, budget, 3, cap, 4, scaling), 0
    for count in chunks:
        keys, values, asked = (torch.randn(heads, count, 8, generator=generator) for heads in (1, 1, 2))
        places = torch.arange(done, done + count)[None]
        angles = adapter.angles(0, keys[None], places)
        rotated, query = adapter.turn(0, keys[None], angles), adapter.turn(0, asked[None], angles)
        query = torch.cat([adapter.turn(0, asked[None, head : head + 1], angles) for head in range(2)], 1)
        layer.update(rotated, values[None])
        ours = layer.attend(Step(None, query, rotated, values[None], None, scaling, None, True, True))
        theirs = reference.take(query[0], keys[0], values[0])
        torch.testing.assert_close(ours[0], theirs, atol=1e-4, rtol=1e-4)
        done += count
        (bank,) = layer.resident.banks
        assert bank.slots[0, : bank.used].tolist() == [entry.slot for entry in reference.entries]
        assert bank.used <= budget
    assert bank.extra is not None and (bank.extra > 0).any()
    counts = 1 + bank.extra[0, : bank.used]
    assert counts.tolist() == [entry.count for entry in reference.entries]
    assert counts.max() == cap if cap else counts.sum() == done


# -- a whole cache --------------------------------------------------------------------------------------


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows))


def step(cache: Any, ids: torch.Tensor, family: str = "llama", mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return tiny(family)(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits


def merged(cache: KeepCache) -> list[MergedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, MergedLayer)]


@pytest.mark.parametrize("name", MERGING)
@pytest.mark.parametrize("cap", [0, 5])
def test_no_value_is_ever_lost(name: str, cap: int) -> None:
    """Counts times values add up to all values that came (those of the first layer depend on the tokens alone), with a
    capped count too: what is divided is multiplied again. Without a cap counts add up to the tokens."""
    ids = tokens(2, 90)
    cache = KeepCache(tiny("llama"), f"{name}:sinks=2,cap={cap},slack=3", 24, chunk=20)
    stock = DynamicCache(config=tiny("llama").config)
    for low, high in ((0, 70), *((at, at + 1) for at in range(70, 90))):
        step(cache, ids[:, low:high])
        step(stock, ids[:, low:high])
        expected = stock.layers[0].values.sum(2)
        (bank,) = merged(cache)[0].banks
        assert bank.used <= 24 and bank.extra is not None
        counts = 1 + bank.extra[:, : bank.used]
        ours = (counts[..., None] * bank.values[:, : bank.used]).sum(1).unflatten(0, (2, -1))
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
        if not cap:
            assert (counts.sum(1) == high).all()
        assert (bank.slots[:, 1 : bank.used] > bank.slots[:, : bank.used - 1]).all()
        assert bank.slots[:, :2].tolist() == [[0, 1]] * 4  # sinks
        assert (bank.slots[:, bank.used - 1] == high - 1).all()


def test_while_nothing_is_merged_it_is_the_stock_cache() -> None:
    ids = tokens(2, 40)
    cache, stock = KeepCache(tiny("llama"), "kvslimmer:sinks=2", 64), DynamicCache(config=tiny("llama").config)
    for low, high in ((0, 30), (30, 33), *((at, at + 1) for at in range(33, 40))):
        torch.testing.assert_close(step(cache, ids[:, low:high]), step(stock, ids[:, low:high]), atol=2e-4, rtol=2e-4)


def test_equal_neighbours_merge_without_a_trace() -> None:
    """Two tokens with the same key at the same place and the same value are one that counts twice."""
    layer, _ = layer_of(KVSlimmer(sinks=0, cap=0, slack=1), 8)
    key, value = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    from kvkeep.stores.merged import Entries

    layer._turned = lambda keys, by: keys  # type: ignore[method-assign]
    layer.heads, layer.outputs, layer.since = 1, torch.randn(1, 8), torch.zeros(1, 1, dtype=torch.int32)
    layer.update(key.expand(-1, -1, 4, -1), value.expand(-1, -1, 4, -1))
    many = torch.arange(4, dtype=torch.int32)[None]
    ones = torch.ones(1, 4)
    entries = Entries(key[0].expand(-1, 4, -1), value[0].expand(-1, 4, -1), many, ones, ones / 4, ones > 0)
    result = layer._merged(layer.resident.banks[0], entries, torch.tensor([[2]]), 4)
    assert result.slots.tolist() == [[-1, -1, 1, 3]] and result.counts.tolist() == [[0, 0, 2, 2]]
    torch.testing.assert_close(result.keys[:, 2:], key[0].expand(-1, 2, -1))
    torch.testing.assert_close(result.values[:, 2:], value[0].expand(-1, 2, -1))


def test_a_rollback_takes_what_stands_for_a_forgotten_token() -> None:
    cache = KeepCache(tiny("llama"), "kvslimmer:sinks=2,cap=0,slack=4", 20, chunk=16)
    ids = tokens(2, 60)
    step(cache, ids[:, :50])
    before = [(layer.resident.banks[0].slots.clone(), layer.resident.banks[0].others.clone()) for layer in merged(cache)]
    stands = [((others > 0) & (slots >= 0)).any() for slots, others in before]
    assert all(stands)
    cut = 0
    for length in (45, 40, 33):
        cache.crop(length - cache.get_seq_length())
        for layer, codes in zip(merged(cache), cache.entry_states(), strict=True):
            (bank,) = layer.resident.banks
            slots, counts = bank.slots[:, : bank.used], 1 + bank.extra[:, : bank.used]
            assert (slots < length).all() and codes.shape[2] == length
            flat = codes.flatten(0, 1)
            for lane in range(4):
                held = [(int(s), int(c)) for s, c in zip(slots[lane], counts[lane], strict=True) if s >= 0]
                told = {slot: EntryState.DROPPED for slot in range(length)}
                for slot, count in held:
                    told |= {own: EntryState.MERGED for own in range(slot - count + 1, slot + 1)}
                    if count == 1:
                        told[slot] = EntryState.RESIDENT
                assert flat[lane].tolist() == [told[slot] for slot in range(length)]
                cut += held[-1][0] != length - 1
    assert cut  # some entries could not be split
    for at in range(50, 60):
        assert step(cache, ids[:, at : at + 1]).isfinite().all()


def test_positions_close_up_after_a_rollback() -> None:
    """What was before a cut entry is turned to where it follows the text that is left."""
    layer, adapter = layer_of(KVSlimmer(sinks=0, cap=0, slack=1), 8)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(1, 1, 9, 8, generator=generator), torch.randn(1, 1, 9, 8, generator=generator)
    rotated = adapter.turn(0, keys, adapter.angles(0, keys, torch.arange(9)[None]))
    for low, high in ((0, 8), (8, 9)):
        layer.update(rotated[:, :, low:high], values[:, :, low:high])
        own = rotated[:, :, low:high]
        layer.attend(Step(None, own, own, values[:, :, low:high], None, 1.0, None, True, True))
    (bank,) = layer.resident.banks
    place = int(bank.extra[0].argmax())  # the pair
    last = int(bank.slots[0, place])
    layer.truncate(last)
    assert bank.slots[0, : bank.used].tolist() == list(range(last - 1))
    # The first of the pair was at last - 1, which the next token takes the place after: all move up by one.
    angles = adapter.angles(0, keys[:, :, : last - 1], torch.arange(1, last)[None])
    torch.testing.assert_close(bank.keys[:, None, : bank.used], adapter.turn(0, keys[:, :, : last - 1], angles))


@pytest.mark.parametrize("name", MERGING)
def test_padding_is_never_merged(name: str) -> None:
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :33] = 0
    cache = KeepCache(tiny("llama"), f"{name}:sinks=2,slack=2", 20, chunk=16)
    step(cache, ids, mask=mask)
    for layer, codes in zip(merged(cache), cache.entry_states(), strict=True):
        assert (codes[1, :, :33] == EntryState.DROPPED).all() and (codes[1, :, 33:] != EntryState.DROPPED).all()
        assert (codes[0] != EntryState.DROPPED).all()
        for bank in layer.resident.banks:
            assert bank.used <= 20 and ((bank.slots >= 0).sum(1) <= 20).all()


@pytest.mark.parametrize("method", [*(f"{name}:sinks=2,slack=3" for name in MERGING), "h2o+merge", "cam"])
def test_a_saved_session_goes_on_as_it_would_have(method: str, tmp_path: Path) -> None:
    ids = tokens(2, 90)
    cache = KeepCache(tiny("llama"), method, 24, chunk=20)
    step(cache, ids[:, :60])
    for at in range(60, 66):
        step(cache, ids[:, at : at + 1])
    save_session(tmp_path / "session", Session(cache, ids[:, :66].tolist()))
    other = load_session(tmp_path / "session", tiny("llama")).cache
    for low, high in (*((at, at + 1) for at in range(66, 80)), (80, 90)):
        one, two = step(cache, ids[:, low:high]), step(other, ids[:, low:high])
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MERGING)
def test_inference_mode_changes_nothing(name: str) -> None:
    """Gradients are taken in it, too."""
    ids, found = tokens(1, 70), []
    for mode in (torch.no_grad, torch.inference_mode):
        cache = KeepCache(tiny("llama"), f"{name}:sinks=2,slack=3", 24, chunk=20)
        with mode():
            for low, high in ((0, 60), *((at, at + 1) for at in range(60, 70))):
                logits = tiny("llama")(ids[:, low:high], past_key_values=cache, logits_to_keep=1).logits
        found.append(logits.clone())
    torch.testing.assert_close(*found)


def test_what_was_clamped_is_told() -> None:
    cache = KeepCache(tiny("llama"), "kvslimmer:sinks=2", 20, chunk=16)
    step(cache, tokens(1, 60))
    pairs, clamped = cache.merges()
    assert pairs == 4 * 2 * 40 and 0 <= clamped <= pairs
    assert KeepCache(tiny("llama"), "h2o", 20).merges() == (0, 0)


def test_what_cannot_be_is_refused() -> None:
    for family in ("gpt2", "deepseek_v3"):
        with pytest.raises(UnsupportedModelError, match=r"merging.*h2o\+merge"):
            KeepCache(tiny(family), "kvslimmer:sinks=4", 32)
    with pytest.raises(BudgetError, match="beside 32 sinks; give it 36"):
        KeepCache(tiny("llama"), "kvslimmer", 35)
    for wrong in (
        "kvslimmer:sinks=-1",
        "kvslimmer:cap=1",
        "kvslimmer:slack=0",
        "kvslimmer+checkpoint",
        "asymkv+verified",
    ):
        with pytest.raises(UsageError):
            KeepCache(tiny("llama"), wrong, 64)


def test_slack_leaves_entries_to_merge() -> None:
    assert slack_of(KVSlimmer(), 512) == 64 and slack_of(KVSlimmer(slack=20), 512) == 20
    assert slack_of(KVSlimmer(slack=0.9), 512) == 120 and slack_of(KVSlimmer(), 36) == 1
