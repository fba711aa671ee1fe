"""What is merged is in something: neighbours with each other, held against a cache in plain loops with unrotated keys,
and what leaves with what stays. Nothing is lost, a rollback forgets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import tiny
from helpers import bounded, padded, prompt, step, stock
from hypothesis import given, settings
from hypothesis import strategies as st
from single import attended, greedy, layer_of, site

from kvkeep import EntryState, KeepCache
from kvkeep.contracts.entries import EvictedEntries
from kvkeep.models.binding import bind
from kvkeep.policies.fates.kvslimmer import KVSlimmer, Neighbours
from kvkeep.policies.fates.merge import Merge
from kvkeep.policies.methods import parts
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.stores.evicted.pairs import OrderedEntries, cheapest, cheapest_pairs, merge
from kvkeep.stores.resident.banks import Bank

INF, DIM = float("inf"), 8
METHODS = [name for name, fate in parts()["fates"].items() if issubclass(fate, Neighbours)]


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

    def roll_back(self, length: int) -> None:
        """Forget the slots from ``length`` on. What was observed remains as the means that it was."""
        for entry in self.entries:
            seen, left = (end - max(entry.slot, self.since) for end in (self.length, length))
            entry.weight *= max(0, left) / max(1, seen)
        left = max(0, length - self.since)
        self.output, self.queries = self.output * left / max(1, self.queries), left
        self.entries = [entry for entry in self.entries if entry.slot < length]
        self.length, self.since, self.due = length, min(self.since, length), min(self.due, length)

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


@pytest.mark.turns(2)
@pytest.mark.parametrize("cap", [0, 3])
@pytest.mark.parametrize(
    "chunks",
    [
        [20, *[1] * 30],
        [9, 16, 16, 5, 1, 1, 16, 1, 1, 1, 3, *[1] * 12],
        [9, 16, 16, 1, -3, 1, 1, -12, 16, 1, 1, -1, 5, -2, -9, *[1] * 9, -4, 9, 9, 1, 1],
    ],
)
def test_equals_merging_in_plain_loops(cap: int, chunks: list[int]) -> None:
    """In a layer of one KV head with two query heads; unrotated keys, turned afresh for every query. A negative number
    is a rollback, after which the text goes on."""
    generator, adapter, done = torch.Generator().manual_seed(3), bind(tiny("llama")), 0
    layer = layer_of(H2O(), KVSlimmer(sinks=3, cap=cap, slack=4), 1, DIM, 20)
    reference = Reference(adapter, 20, 3, cap, 4, 0.7)
    for count in chunks:
        if count < 0:
            done += count
            layer.truncate(done)
            layer.ledger.truncate(done)
            reference.roll_back(done)
            continue
        keys, values, asked = (torch.randn(1, heads, count, DIM, generator=generator) for heads in (1, 1, 2))
        angles = adapter.angles(0, keys, torch.arange(done, done + count)[None])
        query = torch.cat([adapter.turn(0, one, angles) for one in asked.split(1, 1)], 1)
        ours = attended(layer, query, adapter.turn(0, keys, angles), values, 0.7)
        theirs = reference.take(query[0], keys[0, 0], values[0, 0])
        torch.testing.assert_close(ours[0], theirs, atol=1e-4, rtol=1e-4)
        done += count
        (bank,) = layer.resident.banks
        assert [slot for slot in bank.slots[0].tolist() if slot >= 0] == [entry.slot for entry in reference.entries]
        assert bank.used <= 20
    counts = 1 + bank.extra[0, : bank.used]
    assert counts.tolist() == [entry.count for entry in reference.entries] and (counts > 1).any()
    assert counts.max() == cap if cap else counts.sum() == done or min(chunks) < 0


# -- a whole cache --------------------------------------------------------------------------------------


def test_a_rollback_takes_what_stands_for_a_forgotten_token() -> None:
    cache, ids = KeepCache(tiny("llama"), "kvslimmer:sinks=2,cap=0,slack=4", 20, chunk=16), prompt(2, 60)
    step("llama", cache, ids[:, :50])
    cut = 0
    for length in (45, 40, 33):
        cache.crop(length - cache.get_seq_length())
        for layer, codes in zip(bounded(cache), cache.entry_states(), strict=True):
            (bank,) = layer.resident.banks
            slots, counts = bank.slots[:, : bank.used], 1 + bank.extra[:, : bank.used].int()
            assert (slots < length).all() and (counts > 1).any() and codes.shape[2] == length
            for lane, own in enumerate(codes.flatten(0, 1)):
                held = [pair for pair in torch.stack([slots, counts], 2)[lane].tolist() if pair[0] >= 0]
                states = [EntryState.DROPPED] * length
                for slot, count in held:
                    state = EntryState.RESIDENT if count == 1 else EntryState.MERGED
                    states[slot - count + 1 : slot + 1] = [state] * count
                assert own.tolist() == states
                cut += held[-1][0] != length - 1
    assert cut  # some entries could not be split
    for at in range(50, 60):
        assert step("llama", cache, ids[:, at : at + 1]).isfinite().all()


def test_positions_close_up_after_a_rollback() -> None:
    """What was before a cut entry is turned to where it follows the text that is left."""
    layer, adapter = layer_of(H2O(), KVSlimmer(sinks=0, cap=0, slack=1), 1, DIM, 8), bind(tiny("llama"))
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 1, 9, DIM, generator=generator) for _ in range(2))
    rotated = adapter.turn(0, keys, adapter.angles(0, keys, torch.arange(9)[None]))
    for own in (slice(0, 8), slice(8, 9)):
        attended(layer, rotated[:, :, own], rotated[:, :, own], values[:, :, own])
    (bank,) = layer.resident.banks
    last = int(bank.slots[0, int(bank.extra[0].argmax())])  # of the pair
    layer.ledger.truncate(last)
    layer.truncate(last)
    assert bank.slots[0, : bank.used].tolist() == list(range(last - 1))
    # The first of the pair was at last - 1, which the next token takes the place after: all move up by one.
    angles = adapter.angles(0, keys[:, :, : last - 1], torch.arange(1, last)[None])
    torch.testing.assert_close(bank.keys[:, None, : bank.used], adapter.turn(0, keys[:, :, : last - 1], angles))


@pytest.mark.parametrize("name", METHODS)
def test_padding_is_never_merged(name: str) -> None:
    ids, mask = padded([60, 27])
    cache = KeepCache(tiny("llama"), f"{name}:sinks=2,slack=2", 20, chunk=16)
    step("llama", cache, ids, mask)
    for codes in cache.entry_states():
        assert torch.equal(codes == EntryState.DROPPED, (mask == 0)[:, None].expand_as(codes))


def test_pairs_are_counted_and_so_is_what_was_clamped() -> None:
    cache = KeepCache(tiny("llama"), "kvslimmer:sinks=2", 20, chunk=16)
    step("llama", cache, prompt(1, 60))
    pairs, clamped = (sum(counts) for counts in zip(*(one.evicted.merged() for one in bounded(cache)), strict=True))
    assert pairs == 4 * 2 * 40 and 0 <= clamped <= pairs


def test_slack_leaves_entries_to_merge() -> None:
    for slack, budget, pairs in ((0.125, 512, 64), (20, 512, 20), (0.9, 512, 120), (0.125, 36, 1)):
        assert KVSlimmer(slack=slack).pairs_at_once(budget) == pairs


# -- one pass over neighbours -------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, INF]), min_size=9, max_size=9), min_size=1, max_size=4
    ),
    wanted=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pairs_are_greedys(rows: list[list[float]], wanted: int) -> None:
    chosen = cheapest_pairs(torch.tensor(rows), torch.full((len(rows), 1), wanted))
    assert [flags.nonzero().flatten().tolist() for flags in chosen] == [greedy(row, wanted) for row in rows]


def test_pairs_never_overlap_even_where_costs_only_fall() -> None:
    chosen = cheapest_pairs(torch.arange(300.0).flip(0)[None], torch.tensor([[300]]))
    assert not (chosen[:, 1:] & chosen[:, :-1]).any()
    assert chosen.sum() >= 12


def test_equal_neighbours_merge_without_a_trace() -> None:
    """Tokens with the same key at the same place and the same value are one that counts twice; sinks and entries that
    no query has seen are left alone."""
    key, value, ones = torch.randn(1, 1, 8).expand(-1, 6, -1), torch.randn(1, 1, 8).expand(-1, 6, -1), torch.ones(1, 6)
    slots, known = torch.arange(6, dtype=torch.int32)[None], torch.tensor([[True] * 5 + [False]])
    entries = OrderedEntries(key, value, slots, ones, ones / 6, known)
    chosen = cheapest(entries, 1, torch.tensor([[9]]))
    assert chosen.nonzero()[:, 1].tolist() == [1, 3]
    result, tally = merge(entries, chosen, KVSlimmer(cap=0), lambda keys, by: keys, torch.randn(1, 1, 8))
    assert result.slots.tolist() == [[-1, -1, 0, 2, 4, 5]] and result.counts.tolist() == [[0, 0, 1, 2, 2, 1]]
    torch.testing.assert_close(result.attention[:, 2:], torch.tensor([[1.0, 2.0, 2.0, 1.0]]) / 6)
    assert tally.tolist()[0] == 2
    for found, whole in ((result.keys, key), (result.values, value)):
        torch.testing.assert_close(found[:, 2:], whole[:, 2:])


# -- what leaves joins what stays ----------------------------------------------------------------------------


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("method", "cap"),
    [
        *((f"{name}+merge", 0) for name in ("h2o", "tova", "random", "streaming-llm", "window")),
        *((name, cap) for name in METHODS for cap in (0, 5)),
    ],
)
def test_what_is_merged_adds_up_to_all_that_came(method: str, cap: int) -> None:
    """Counts times values, in the first layer, where they depend on the tokens alone, and with a capped count too: what
    is divided is multiplied again. Without a cap counts add up to the tokens. Where keys are averaged, so do they."""
    ids, whole = prompt(2, 90), stock("llama")
    neighbours = method in METHODS
    spec = f"{method}:sinks=2,cap={cap},slack=3" if neighbours else method
    cache = KeepCache(tiny("llama"), spec, 24, chunk=20)
    for low, high in ((0, 60), (60, 67), *((at, at + 1) for at in range(67, 90))):
        for each in (cache, whole):
            step("llama", each, ids[:, low:high])
        (bank,) = bounded(cache)[0].resident.banks
        assert bank.used <= 24 and bank.extra is not None
        counts = (1 + bank.extra[:, : bank.used])[..., None]
        assert cap or (counts.sum(1) == high).all()
        for name in ("values",) if neighbours else ("keys", "values"):
            ours = (counts * getattr(bank, name)[:, : bank.used]).sum(1).unflatten(0, (2, -1))
            torch.testing.assert_close(ours, getattr(whole.layers[0], name).sum(2), atol=1e-3, rtol=1e-3)
        if neighbours:
            assert (bank.slots[:, 1 : bank.used] > bank.slots[:, : bank.used - 1]).all()
            assert bank.slots[:, :2].tolist() == [[0, 1]] * 4  # sinks
            assert (bank.slots[:, bank.used - 1] == high - 1).all()


def test_what_leaves_joins_its_like_and_weighs_by_its_count() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    bank = Bank(None, 3, keys.clone(), keys.clone(), torch.tensor([[4, 9, 2]]), None, used=3)
    one, seven = torch.ones(1, 1), torch.tensor([[7]])
    left = EvictedEntries(keys[:, 1:2] * 3, keys[:, 1:2], torch.tensor([[6]]), None, one, seven)  # it stands for two
    Merge().store(site(1, 2, 3), None).merge(bank, left)
    assert bank.extra is not None and bank.newest is not None
    assert bank.extra.tolist() == [[0, 2, 0]] and bank.newest.tolist() == [[0, 7, 0]]
    torch.testing.assert_close(bank.keys[0, 1], torch.tensor([0.0, 7 / 3]))
    torch.testing.assert_close(bank.values, keys)


def test_a_rollback_takes_what_a_forgotten_entry_has_joined() -> None:
    cache, ids = KeepCache(tiny("llama"), "tova+merge", 20, chunk=16), prompt(1, 60)
    step("llama", cache, ids[:, :50])
    banks = [layer.resident.banks.banks[0] for layer in bounded(cache)]
    newest = [torch.maximum(bank.newest, bank.slots) for bank in banks]
    assert any((bank.slots < 42)[rows >= 42].any() for bank, rows in zip(banks, newest, strict=True))
    cache.crop(-8)
    for bank, rows, codes in zip(banks, newest, cache.entry_states(), strict=True):
        assert (bank.slots[rows >= 42] == -1).all() and (bank.slots[rows < 42] >= 0).all()
        assert bank.extra is not None and (bank.extra[bank.slots < 0] == 0).all()
        assert set(codes.flatten().tolist()) <= {EntryState.RESIDENT, EntryState.MERGED}
    for at in range(50, 60):
        assert step("llama", cache, ids[:, at : at + 1]).isfinite().all()
