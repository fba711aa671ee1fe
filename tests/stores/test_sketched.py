"""KVReviver against its own pseudocode in plain Python, and what a sketch as a fate must keep to."""

from __future__ import annotations

from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny
from kvkeep.policies.fates.sketched import Sketched, _Reviving
from kvkeep.stores.parts import Parts
from kvkeep.stores.streamed import Step
from torch import Tensor

from kvkeep import BudgetError, EntryState, KeepCache, UsageError
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.memory.places import Device
from kvkeep.policies.methods import METHODS
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.sketch import places

HEADS, GROUP, DIM, EXACT, SLOTS, SWAP = 2, 2, 4, 8, 3, 1.1


class Reviver:
    """One lane by Algorithms 1 to 4: a dictionary of exact entries, lists of cells, loops."""

    def __init__(self) -> None:
        self.exact: dict[int, tuple[list[float], list[float]]] = {}  # Recent and Candidate
        self.marks: dict[int, float] = {}  # of all entries
        self.vague: list[int] = []
        self.keys = [[0.0] * DIM for _ in range(3 * SLOTS)]
        self.values = [[0.0] * DIM for _ in range(3 * SLOTS)]
        self.swaps = 0

    def where(self, slot: int) -> list[tuple[int, int]]:
        return [(int(at) % (3 * SLOTS), -1 if at >= 3 * SLOTS else 1) for at in places(torch.tensor(slot), 3, SLOTS)]

    def add(self, slot: int, key: list[float], value: list[float], times: int = 1) -> None:
        for cell, sign in self.where(slot):
            self.keys[cell] = [a + times * b for a, b in zip(self.keys[cell], key, strict=True)]
            self.values[cell] = [a + times * sign * b for a, b in zip(self.values[cell], value, strict=True)]
        self.vague = [*self.vague, slot] if times > 0 else [own for own in self.vague if own != slot]

    def query(self, slot: int) -> tuple[list[float], list[float]]:
        cells = self.where(slot)
        return (
            [median(self.keys[cell][channel] for cell, _ in cells) for channel in range(DIM)],
            [median(sign * self.values[cell][channel] for cell, sign in cells) for channel in range(DIM)],
        )

    def candidates(self, length: int) -> list[int]:
        """What is not Recent, the least attended first."""
        recent = length - EXACT // 2
        return sorted((slot for slot in self.exact if slot < recent), key=lambda slot: self.marks[slot])

    def step(self, slot: int, query: Tensor, key: list[float], value: list[float]) -> Tensor:
        if len(self.exact) == EXACT:
            leaves = self.candidates(slot + 1)[0]
            self.add(leaves, *self.exact.pop(leaves))
        self.exact[slot], self.marks[slot] = (key, value), 0.0
        all_of_them = self.exact | {own: self.query(own) for own in self.vague}  # Algorithm 4
        keys, values = (torch.tensor([entry[part] for entry in all_of_them.values()]) for part in (0, 1))
        weights = (query @ keys.T).softmax(-1)
        for own, weight in zip(all_of_them, weights.mean(0).tolist(), strict=True):
            self.marks[own] += weight
        low, high = self.candidates(slot + 1), sorted(self.vague, key=lambda own: -self.marks[own])
        pairs = [(a, b) for a, b in zip(low, high, strict=False) if self.marks[a] * SWAP < self.marks[b]]
        estimates = [self.query(b) for _, b in pairs]
        for (_, b), estimate in zip(pairs, estimates, strict=True):
            self.add(b, *estimate, times=-1)
        for (a, b), estimate in zip(pairs, estimates, strict=True):
            self.add(a, *self.exact.pop(a))
            self.exact[b] = estimate
        self.swaps += len(pairs)
        return weights @ values


@pytest.mark.parametrize("seed", range(3))
def test_it_does_what_the_pseudocode_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ledger, meter = Ledger(), Meter()
    fate = _Reviving(Sketched(swap=SWAP), {0: SLOTS}, ledger, meter)
    layer = SelectedLayer(Parts(0, (EXACT,), H2O(), fate, Device(torch.device("cpu")), ledger, meter))
    lanes = [Reviver() for _ in range(HEADS)]
    for slot in range(60):
        query = 2 * torch.randn(1, HEADS * GROUP, 1, DIM, generator=generator)
        key, value = (torch.randn(1, HEADS, 1, DIM, generator=generator) for _ in range(2))
        ledger.append(torch.zeros(1, 1, dtype=torch.int64), None, None, None)
        layer.update(key, value)
        output = layer.attend(Step(SimpleNamespace(), query, key, value, None, 1.0, None, True, True))
        for head, lane in enumerate(lanes):
            own = query[0, head * GROUP : (head + 1) * GROUP, 0]
            expected = lane.step(slot, own, key[0, head, 0].tolist(), value[0, head, 0].tolist())
            torch.testing.assert_close(
                output[0, head * GROUP : (head + 1) * GROUP, 0], expected, atol=1e-4, rtol=1e-3, msg=f"token {slot}"
            )
            (bank,) = layer.resident.banks
            assert sorted(bank.slots[head][: bank.used].tolist()) == sorted(lane.exact)
    assert sum(lane.swaps for lane in lanes) > 3
    codes = layer.whereabouts(60)[0]
    for head, lane in enumerate(lanes):
        assert (codes[head] == EntryState.SKETCHED).nonzero().flatten().tolist() == sorted(lane.vague)


# -- the budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimate", ["plain", "shrunk"])
@pytest.mark.parametrize("vague", [0.1, 0.3, 0.5])
def test_exact_entries_and_sketch_share_the_budget(estimate: str, vague: float) -> None:
    cache = KeepCache(tiny("llama"), f"h2o+sketch:vague={vague},estimate={estimate}", 60, chunk=20)
    with torch.no_grad():
        tiny("llama")(torch.randint(2, 97, (2, 150)), past_key_values=cache)
    memory, whole = cache.memory(), 2 * 60 * cache.geometry.kv_bytes_per_token
    assert 0.9 * whole < memory.resident_bytes + memory.compressed_bytes <= whole
    assert 0.7 * vague < memory.compressed_bytes / whole <= vague
    assert memory.peak_cache_bytes <= whole + 2 * 20 * cache.geometry.kv_bytes_per_token // 4


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("vague=0", "share"),
        ("vague=0.6", "share"),
        ("swap=0.5", "1 times"),
        ("rows=2", "rows"),
        ("by=mode", "median"),
        ("estimate=best", "centred"),
        ("keys=odd", "unsigned"),
    ],
)
def test_bad_parameters_are_refused(given: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        KeepCache(tiny("llama"), f"h2o+sketch:{given}", 40)


def test_a_budget_without_room_is_refused() -> None:
    with pytest.raises(BudgetError, match="at least 20"):
        KeepCache(tiny("llama"), "h2o+sketch:rows=5", 19, chunk=8)


# -- rollback and sessions --------------------------------------------------------------------------


def step(cache: KeepCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return tiny("llama")(ids, past_key_values=cache).logits[:, -1]


@pytest.mark.parametrize("method", ["random+sketch", "random+sketch:estimate=shrunk,by=mean"])
def test_a_rollback_takes_estimates_out_and_answers_with_no_forgotten_slot(method: str) -> None:
    """ "random" lets new entries leave at once. What is deleted is what attention saw, in every slot it had."""
    cache, ids = KeepCache(tiny("llama"), method, 16, chunk=16), torch.randint(2, 97, (2, 40))
    step(cache, ids)
    live: Any = cache.fate
    before = {layer: [sketch.cells.clone() for sketch in pair] for layer, pair in live.sketches.items()}
    gone = {layer: inside[:, 30:40].clone() for layer, inside in live.inside.items()}
    assert all(flags.any() for flags in gone.values())
    kept = {layer: inside[:, :30].clone() for layer, inside in live.inside.items()}
    cache.crop(-10)
    for layer, inside in live.inside.items():
        assert torch.equal(inside[:, :30], kept[layer]) and not inside[:, 30:].any()
        assert not all(torch.equal(a, b.cells) for a, b in zip(before[layer], live.sketches[layer], strict=True))
        yielded = [piece[0] for piece in live.recall(cache.layers[layer], torch.zeros(4, 2, 1, 8))]
        assert max(int(slots.max()) for slots in yielded) < 30
    assert step(cache, ids[:, 30:]).isfinite().all()


def test_a_saved_cache_goes_on_as_it_would_have() -> None:
    ids = torch.randint(2, 97, (2, 50))
    one, other = (KeepCache(tiny("llama"), "kvreviver:estimate=shrunk", 20, chunk=10) for _ in range(2))
    step(one, ids[:, :40])
    saved = {name: part.clone() for name, part in one.fate.state().items()}  # type: ignore[union-attr]
    step(other, ids[:, :40])
    other.fate.restore(saved)  # type: ignore[union-attr]
    again = other.fate.state()  # type: ignore[union-attr]
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
    for place in range(40, 50):
        torch.testing.assert_close(
            step(one, ids[:, place : place + 1]), step(other, ids[:, place : place + 1]), atol=0, rtol=0
        )


def test_drafts_from_a_sketch_are_verified_all_the_same() -> None:
    """Whatever drafts, the forward pass is exact."""
    ids = torch.randint(2, 97, (1, 45))
    cache = KeepCache(tiny("llama"), "h2o+sketch+verified:3", 24, checkpoint="kv", where="host")
    exact = KeepCache(tiny("llama"), "full")
    torch.testing.assert_close(step(cache, ids), step(exact, ids), atol=2e-4, rtol=2e-4)


def test_the_preset_is_its_parts() -> None:
    assert METHODS["kvreviver"].exactness == "reversible"
    cache = KeepCache(tiny("llama"), "kvreviver:vague=0.2", 60)
    live: Any = cache.fate
    assert (live.how.swap, live.how.vague, live.how.by, live.how.keys) == (1.1, 0.2, "median", "unsigned")
    assert isinstance(live, _Reviving)
