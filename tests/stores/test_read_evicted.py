"""Stores that listen: whatever they exchange, no entry is lost or counted twice, and scores travel along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from families import FAMILIES, tiny
from helpers import NEW, assert_near, bounded, expected, padded, prompt, read, step
from single import attended, layer_of
from torch import Tensor

from kvkeep import KeepCache
from kvkeep.contracts.entries import Piece
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.policies.registry import FATES, SELECTORS

BUDGET, CHUNK = 16, 16


@dataclass(frozen=True)
class Hoard(Fate):
    """Keeps what leaves as it is, and after every step brings back up to ``back`` entries of it that rank higher than
    what is resident."""

    back: int = 3
    label: ClassVar[str] = "hoarded"
    exactness: ClassVar[Exactness] = Exactness.EXACT

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return Hoarding(self.back)


class Hoarding(EvictedStore):
    listens = True

    def __init__(self, back: int) -> None:
        self.back, self.brought = back, 0
        self.held: list[Tensor] = []  # keys, values, slots, scores, by lane

    def take(self, left: Any, resident: Any) -> None:
        assert left.scores.dtype == torch.float32
        self.held = [torch.cat(pair, 1) for pair in zip(self.held, left[:4], strict=True)] if self.held else [*left[:4]]

    def pieces(self, query: Tensor, resident: Any, length: int) -> Iterator[Piece]:
        middle = self.held[2].shape[1] // 2 if self.held else 0  # two pieces, of different lengths
        for part in (slice(0, middle), slice(middle, None)) if self.held else ():
            keys, values, slots, _ = (rows[:, part] for rows in self.held)
            if slots.shape[1]:
                yield Piece(keys[:, None], values[:, None], slots, gaps=True)

    def observe(self, weights: Sequence[Tensor], queries: int, resident: Any) -> None:
        if weights:
            _, _, slots, scores = self.held
            received = torch.cat([*weights], 1)
            assert received.shape == slots.shape and not received[slots < 0].any()
            self.held[3] = resident.observed(slots, scores, received, queries)

    def swap(self, resident: Any, length: int) -> None:
        if not self.held:
            return
        keys, values, slots, scores = self.held
        best = scores.masked_fill(slots < 0, float("-inf")).topk(min(self.back, slots.shape[1], BUDGET), 1)
        lowest = resident.lowest(best.indices.shape[1])
        chosen = slots.gather(1, best.indices).masked_fill(best.values <= lowest, -1)
        self.brought += int((chosen >= 0).sum())
        gone = slots.scatter(1, best.indices, slots.gather(1, best.indices).masked_fill(chosen >= 0, -1))
        self.held = [keys, values, gone, scores]
        coming = (rows.gather(1, best.indices[..., None].expand(-1, -1, rows.shape[2])) for rows in (keys, values))
        resident.swap_in(chosen, *coming, best.values)

    def truncate(self, length: int, resident: Any) -> None:
        for slots in self.held[2:3]:
            slots.masked_fill_(slots >= length, -1)

    def select(self, lanes: Tensor) -> None:
        self.held = [part[lanes] for part in self.held]


@pytest.fixture(autouse=True)
def _hoard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FATES, "hoard", Hoard)


@pytest.mark.turns(2)
@pytest.mark.parametrize("selector", ["h2o", "snapkv:window=4,kernel=3", "window", "lru", "knorm"])
@pytest.mark.parametrize("lengths", [[50], [50, 31, 9]])
def test_nothing_is_lost_and_nothing_counts_twice(selector: str, lengths: list[int]) -> None:
    """A store that keeps everything as it is is exact, whatever goes to and fro; after a rollback too."""
    ids, mask = padded(lengths)
    cache = KeepCache(tiny("llama"), f"{selector}+hoard", BUDGET, chunk=CHUNK)
    assert_near(read("llama", cache, ids, mask, 10), expected("llama", ids, mask)[:, -11:])
    layers = bounded(cache)
    if selector in ("h2o", "snapkv:window=4,kernel=3"):
        assert sum(layer.evicted.brought for layer in layers) > 3
    for layer in layers:
        for lane, own in enumerate(layer.resident.resident_slots()):
            hoarded = [slot for slot in layer.evicted.held[2][lane].tolist() if slot >= 0]
            first = 50 - lengths[lane // layer.heads]
            slots = sorted(slot for slot in [*own.nonzero().flatten().tolist(), *hoarded] if slot >= first)
            assert slots == list(range(first, 50))
    cache.crop(-7)
    order = torch.arange(len(lengths)).flip(0)
    cache.reorder_cache(order)
    ids, mask = torch.cat([ids[order, :43], ids[:, :5]], 1), torch.cat([mask[order, :43], mask[:, -5:]], 1)
    whole, places = expected("llama", ids, mask), (mask.cumsum(1) - 1).clamp(min=0)
    for at in range(43, 48):
        own = slice(at, at + 1)
        ours = step("llama", cache, ids[:, own], mask[:, : at + 1], position_ids=places[:, own])
        assert_near(ours[:, -1], whole[:, at])


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_attention_of_every_family_is_counted(family: str) -> None:
    """What resident and hoarded entries were given adds up to the queries there were: scores went along both ways."""
    ids = prompt(1, 45, seed=2)
    cache = KeepCache(tiny(family), "h2o:recent=0.2+hoard", BUDGET, chunk=CHUNK)
    queries: dict[int, int] = {}
    own = cache.stream.attend

    def attend(module: Any, query: Tensor, *args: Any) -> Tensor:
        source = cache.geometry.layers[module.layer_idx].source
        queries[source] = queries.get(source, 0) + query.shape[2]
        return own(module, query, *args)

    cache.stream.attend = attend
    assert_near(read(family, cache, ids), expected(family, ids)[:, -NEW - 1 :])
    layers = bounded(cache)
    assert sum(layer.evicted.brought for layer in layers)
    for layer in layers:
        (bank,) = layer.resident.banks
        _, _, slots, scores = layer.evicted.held
        assert bank.scores is not None
        total = bank.scores.masked_fill(bank.slots < 0, 0).sum(1) + scores.masked_fill(slots < 0, 0).sum(1)
        if family == "gpt_oss":  # whose sinks take a part
            assert bool((total < queries[layer.index] - 0.1).all()) and bool((total > queries[layer.index] / 4).all())
            continue
        torch.testing.assert_close(total, torch.full_like(total, queries[layer.index]), atol=1e-3, rtol=1e-4)


def test_what_is_lowest_leaves_first() -> None:
    """In each lane, of banks of different widths."""
    ids, mask = padded([150, 20])
    cache = KeepCache(tiny("llama"), "h2o:recent=0+hoard:0", 140, chunk=60)
    read("llama", cache, ids, mask, 1)
    resident = bounded(cache)[0].resident
    assert len(resident.banks) == 2
    ranks = resident.lowest(130)
    for bank in resident.banks:
        for own, lane in enumerate(bank.lanes.tolist()):
            scores = bank.scores[own][bank.slots[own] >= 0].sort().values
            ends = [
                torch.full((size,), end) for size, end in ((bank.columns - len(scores), -torch.inf), (130, torch.inf))
            ]
            torch.testing.assert_close(ranks[lane], torch.cat([ends[0], scores, ends[1]])[:130])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fate", ["kvslimmer", "asymkv"])
def test_a_store_learns_every_step_of_one_token(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing has been merged yet, its attention comes with what entries receive, and its output is learnt."""
    torch.manual_seed(0)
    layer = layer_of(SELECTORS["h2o"](), FATES[fate](), 2, 16, 256)
    learnt: list[Tensor] = []
    monkeypatch.setattr(layer.evicted, "attended", lambda step, output, resident: learnt.append(output))
    for number in (40, 1, 1, 1):
        output = attended(layer, *(torch.randn(1, heads, number, 16).bfloat16() for heads in (4, 2, 2)))
        assert torch.equal(learnt[-1].flatten(0, 1), output.flatten(0, 1))
    assert len(learnt) == 4
