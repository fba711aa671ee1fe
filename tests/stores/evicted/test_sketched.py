"""KVReviver against its own pseudocode in plain Python, and what sketches must keep to."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from families import tiny
from helpers import bounded, padded, prompt, step
from kvkeep_lab.published.sketch_variants import SketchVariants
from single import attended, layer_of
from torch import Tensor

from kvkeep import EntryState, KeepCache
from kvkeep.contracts.entries import EvictedEntries
from kvkeep.contracts.part import Site
from kvkeep.contracts.selector import Selector
from kvkeep.policies.fates.sketch import Sketch
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.tova import Tova
from kvkeep.stores.evicted.sketch import places
from kvkeep.stores.evicted.sketched import Hashed, Sketched, _highest
from kvkeep.stores.layer import Layer

HEADS, GROUP, DIM, EXACT, SLOTS, SWAP = 2, 2, 4, 8, 3, 1.1


def sketched(selector: Selector, heads: int, keys: str = "unsigned", rate: float = SWAP) -> Layer:
    fate = SketchVariants(swap=SWAP, keys=keys) if keys == "averaged" else Sketch(swap=SWAP)

    def store(site: Site) -> Sketched:
        made = fate.store(site, Hashed(site.ledger))
        assert isinstance(made, Sketched)
        made.size, made.swap_at = SLOTS, rate
        return made

    return layer_of(selector, fate, heads, DIM, EXACT, store)


class Reviver:
    """One lane by Algorithms 1 to 4: a dictionary of exact entries, lists of cells, loops. averaged: a key is looked up
    as the mean of those in its cell."""

    def __init__(self, averaged: bool, rate: float) -> None:
        self.averaged, self.rate = averaged, rate
        self.exact: dict[int, tuple[list[float], list[float]]] = {}  # Recent and Candidate
        self.scores: dict[int, float] = {}  # of all entries
        self.vague: list[int] = []
        self.keys = [[0.0] * DIM for _ in range(3 * SLOTS)]
        self.values = [[0.0] * DIM for _ in range(3 * SLOTS)]
        self.counts = [0] * (3 * SLOTS)
        self.swaps = 0

    def where(self, slot: int) -> list[tuple[int, int]]:
        return [(int(at) % (3 * SLOTS), -1 if at >= 3 * SLOTS else 1) for at in places(torch.tensor(slot), 3, SLOTS)]

    def add(self, slot: int, key: list[float], value: list[float], times: int = 1) -> None:
        for cell, sign in self.where(slot):
            self.counts[cell] += times
            self.keys[cell] = [a + times * b for a, b in zip(self.keys[cell], key, strict=True)]
            self.values[cell] = [a + times * sign * b for a, b in zip(self.values[cell], value, strict=True)]
        self.vague = [*self.vague, slot] if times > 0 else [own for own in self.vague if own != slot]

    def query(self, slot: int) -> tuple[list[float], list[float]]:
        cells = self.where(slot)
        parts = [max(1, count) if self.averaged else 1 for count in self.counts]
        return (
            [median(self.keys[cell][channel] / parts[cell] for cell, _ in cells) for channel in range(DIM)],
            [median(sign * self.values[cell][channel] for cell, sign in cells) for channel in range(DIM)],
        )

    def candidates(self, length: int) -> list[int]:
        """What is not Recent, the least attended first."""
        recent = length - EXACT // 2
        return sorted((slot for slot in self.exact if slot < recent), key=lambda slot: self.scores[slot])

    def step(self, slot: int, query: Tensor, key: list[float], value: list[float]) -> Tensor:
        if len(self.exact) == EXACT:
            leaves = self.candidates(slot + 1)[0]
            self.add(leaves, *self.exact.pop(leaves))
        self.exact[slot], self.scores[slot] = (key, value), 0.0
        all_of_them = self.exact | {own: self.query(own) for own in self.vague}  # Algorithm 4
        keys, values = (torch.tensor([entry[part] for entry in all_of_them.values()]) for part in (0, 1))
        weights = (query @ keys.T).softmax(-1)
        for own, weight in zip(all_of_them, weights.mean(0).tolist(), strict=True):
            self.scores[own] += weight
        low, high = self.candidates(slot + 1), sorted(self.vague, key=lambda own: -self.scores[own])
        pairs = [(a, b) for a, b in zip(low, high, strict=False) if self.scores[a] * self.rate < self.scores[b]]
        estimates = [self.query(b) for _, b in pairs]
        for (_, b), estimate in zip(pairs, estimates, strict=True):
            self.add(b, *estimate, times=-1)
        for (a, b), estimate in zip(pairs, estimates, strict=True):
            self.add(a, *self.exact.pop(a))
            self.exact[b] = estimate
        self.swaps += len(pairs)
        return weights @ values


@pytest.mark.turns(2)
@pytest.mark.parametrize(("keys", "rate"), [("unsigned", SWAP), ("averaged", 0.1)])
@pytest.mark.parametrize("seed", range(3))
def test_it_does_what_the_pseudocode_does(seed: int, keys: str, rate: float) -> None:
    """``rate``: the ReplaceRate; at 1.1 none of these averages ranks high enough to come back."""
    generator = torch.Generator().manual_seed(seed)
    lanes = [Reviver(keys == "averaged", rate) for _ in range(HEADS)]
    layer = sketched(H2O(), HEADS, keys, rate)
    for slot in range(60):
        query = 2 * torch.randn(1, HEADS * GROUP, 1, DIM, generator=generator)
        key, value = (torch.randn(1, HEADS, 1, DIM, generator=generator) for _ in range(2))
        output = attended(layer, query, key, value)
        (bank,) = layer.resident.banks
        for head, lane in enumerate(lanes):
            own = slice(head * GROUP, (head + 1) * GROUP)
            expected = lane.step(slot, query[0, own, 0], key[0, head, 0].tolist(), value[0, head, 0].tolist())
            torch.testing.assert_close(output[0, own, 0], expected, atol=1e-4, rtol=1e-3, msg=f"token {slot}")
            assert sorted(bank.slots[head][: bank.used].tolist()) == sorted(lane.exact)
    assert sum(lane.swaps for lane in lanes) > 3
    for codes, lane in zip(layer.entry_states(60, 1)[0], lanes, strict=True):
        assert (codes == EntryState.SKETCHED).nonzero().flatten().tolist() == sorted(lane.vague)


@pytest.mark.parametrize("estimate", ["sketch:", "sketch-variants:estimate=shrunk,", "sketch-variants:keys=averaged,"])
@pytest.mark.parametrize("vague", [0.1, 0.3, 0.5])
def test_exact_entries_and_sketch_share_the_budget(estimate: str, vague: float) -> None:
    cache = KeepCache(tiny("llama"), f"h2o+{estimate}vague={vague}", 60, chunk=20)
    step("llama", cache, prompt(2, 150))
    memory, whole = cache.memory(), 2 * 60 * cache.geometry.kv_bytes_per_token
    assert 0.9 * whole < memory.resident_bytes + memory.compressed_bytes <= whole
    assert 0.5 * vague < memory.compressed_bytes / whole <= vague
    assert memory.peak_cache_bytes <= whole + 2 * 20 * cache.geometry.kv_bytes_per_token // 4


@pytest.mark.parametrize(
    "method", ["random+sketch", "random+sketch-variants:keys=averaged", "random+sketch-variants:estimate=shrunk"]
)
def test_a_rollback_takes_estimates_out_and_answers_with_no_forgotten_slot(method: str) -> None:
    """ "random" lets new entries leave at once. What is deleted is what attention saw, in every slot it had."""
    cache, ids = KeepCache(tiny("llama"), method, 16, chunk=16), prompt(2, 40)
    step("llama", cache, ids)
    stores = [layer.evicted for layer in bounded(cache)]
    before = [([sketch.cells.clone() for sketch in store.sketches], store.inside.clone()) for store in stores]
    assert all(inside[:, 30:40].any() for _, inside in before)
    cache.crop(-10)
    for layer, store, (cells, inside) in zip(bounded(cache), stores, before, strict=True):
        assert torch.equal(store.inside[:, :30], inside[:, :30]) and not store.inside[:, 30:].any()
        assert not any(torch.equal(old, new.cells) for old, new in zip(cells, store.sketches, strict=True))
        pieces = store.pieces(torch.zeros(4, 2, 1, 8), layer.resident, 30)
        assert max(int(piece.slots.max()) for piece in pieces) < 30
    assert step("llama", cache, ids[:, 30:]).isfinite().all()


def test_of_those_that_rank_the_same_the_oldest_leave_and_the_oldest_come_back() -> None:
    """Entries that share all their slots of a sketch are estimated alike, so they may well rank the same, exactly; and
    rows of a batch must not differ by where their entries lie."""
    layer = sketched(Tova(), 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        key = torch.randn(1, 3, 1, DIM, generator=generator)
        attended(layer, key, key, key)
    (bank,), store = layer.resident.banks, layer.evicted
    for lane in range(3):  # where entries lie is another order in each lane
        order = torch.randperm(EXACT, generator=generator)
        for rows in (bank.keys, bank.values, bank.slots):
            rows[lane] = rows[lane, order]
    bank.scores, store.scores = torch.full_like(bank.scores, 0.1), torch.full_like(store.scores, 0.9)
    held, inside = [set(slots) for slots in bank.slots.tolist()], store.inside.clone()
    store.swap(layer.resident, 100)
    for lane, before in enumerate(held):
        came = sorted(set(bank.slots[lane].tolist()) - before)
        assert came == inside[lane].nonzero().flatten().tolist()[: len(came)] and len(came) == EXACT
    bank.scores.fill_(0.5)
    oldest = [min(slots) for slots in bank.slots.tolist()]
    layer.ledger.append(torch.zeros(1, 1, dtype=torch.int64), None, None, None)
    layer.resident.arrive(key[0], key[0])
    left = layer.resident.admit(key[0], key[0], 100)
    assert isinstance(left, EvictedEntries) and left.slots.flatten().tolist() == oldest


@pytest.mark.parametrize("padding", [30, 150])
def test_rows_padded_by_more_than_a_chunk(padding: int) -> None:
    ids, mask = padded([170, 170 - padding])
    logits = step("llama", KeepCache(tiny("llama"), "h2o+sketch", 64), ids[1:], mask[1:], logits_to_keep=0)
    assert logits[:, padding:].isfinite().all()


def test_the_highest_are_those_of_a_stable_sort() -> None:
    torch.manual_seed(0)
    ranks = torch.randint(-3, 4, (5, 200)) / 2.0
    ranks[:, ::7], ranks[:, 3::50] = float("-inf"), -0.0
    wanted = ranks.sort(dim=1, descending=True, stable=True)
    for found, own in zip(_highest(ranks, 80), wanted, strict=True):
        assert torch.equal(found, own[:, :80])
