"""Fates that hear: whatever they exchange, no entry is lost or counted twice, and marks travel along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from families import FAMILIES, padded, read, tiny
from torch import Tensor
from transformers import DynamicCache

from kvkeep import KeepCache
from kvkeep.policies.fates import FATES, Fate
from kvkeep.policies.request import Exactness
from kvkeep.stores import exchange
from kvkeep.stores.selected import SelectedLayer

BUDGET, CHUNK = 16, 16


@dataclass(frozen=True)
class Hoard(Fate):
    """Keeps what leaves as it is, and after every step brings back up to ``back`` entries of it that rank higher than
    what is resident."""

    back: int = 3
    label: ClassVar[str] = "hoarded"
    recall: ClassVar[str] = "everything"
    exactness: ClassVar[Exactness] = Exactness.EXACT

    def build(self, request: Any, ledger: Any, meter: Any) -> Any:
        return Hoarding(self.back)


class Hoarding:
    forgets = False
    compressed_bytes = bookkeeping_bytes = 0

    def __init__(self, back: int) -> None:
        self.back, self.brought = back, 0
        self.held: dict[int, list[Tensor]] = {}  # by layer: keys, values, slots, marks, all by lane

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        assert marks is not None and marks.dtype == torch.float32
        new = [part.flatten(0, 1) for part in (keys, values, slots, marks)]
        old = self.held.get(layer)
        self.held[layer] = new if old is None else [torch.cat(pair, 1) for pair in zip(old, new, strict=True)]

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Tensor, Tensor]]:
        if (held := self.held.get(layer.index)) is None:
            return
        middle = held[2].shape[1] // 2  # two pieces, of different lengths
        for part in (slice(0, middle), slice(middle, None)):
            if held[2][:, part].shape[1]:
                yield held[2][:, part], True, held[0][:, None, part], held[1][:, None, part]

    def hear(self, layer: SelectedLayer, weights: Sequence[Tensor], queries: int) -> None:
        if not weights:
            return
        _, _, slots, marks = held = self.held[layer.index]
        told = torch.cat(list(weights), 1)
        assert told.shape == slots.shape and not told[slots < 0].any()
        held[3] = layer.noted(slots, marks, told, queries)

    def exchange(self, layer: SelectedLayer) -> None:
        if (held := self.held.get(layer.index)) is None:
            return
        keys, values, slots, marks = held
        best = marks.masked_fill(slots < 0, float("-inf")).topk(min(self.back, slots.shape[1], BUDGET), 1)
        lowest = exchange.lowest(layer, best.indices.shape[1])
        chosen = slots.gather(1, best.indices).masked_fill(best.values <= lowest, -1)
        self.brought += int((chosen >= 0).sum())
        index = best.indices[..., None]
        gone = slots.scatter(1, best.indices, torch.where(chosen >= 0, -1, slots.gather(1, best.indices)))
        self.held[layer.index] = [keys, values, gone, marks]
        coming = (rows.gather(1, index.expand(-1, -1, rows.shape[2])) for rows in (keys, values))
        exchange.bring(layer, chosen, *coming, best.values)

    def whereabouts(self, layer: SelectedLayer, length: int) -> Tensor:
        return torch.full((layer.rows, layer.heads, length), 2)

    def truncate(self, length: int) -> None:
        for _, _, slots, _ in self.held.values():
            slots.masked_fill_(slots >= length, -1)

    def select(self, index: Tensor) -> None:
        for layer, held in self.held.items():
            rows = [part.unflatten(0, (-1, 2 if part.shape[0] % 2 == 0 else 1)) for part in held]
            self.held[layer] = [part[index].flatten(0, 1) for part in rows]


@pytest.fixture(autouse=True)
def _hoard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FATES, "hoard", Hoard)


def selected(cache: KeepCache) -> list[SelectedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, SelectedLayer)]


@pytest.mark.parametrize("selector", ["h2o", "snapkv:window=4,kernel=3", "window", "lru", "knorm"])
@pytest.mark.parametrize("lengths", [[50], [50, 31, 9]])
def test_nothing_is_lost_and_nothing_counts_twice(selector: str, lengths: list[int]) -> None:
    """A fate that keeps everything as it is is exact, whatever goes to and fro."""
    ids, mask = padded(lengths)
    cache = KeepCache(tiny("llama"), f"{selector}+hoard", BUDGET, chunk=CHUNK)
    ours = read("llama", cache, ids, mask, 10)
    theirs = read("llama", DynamicCache(config=tiny("llama").config), ids, mask, 10)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    if selector in ("h2o", "snapkv:window=4,kernel=3"):
        assert cache.fate.brought > 3
    for layer in selected(cache):
        hoarded = cache.fate.held[layer.index][2]
        for lane, own in enumerate(layer.resident.held()):
            slots = [*own.nonzero().flatten().tolist(), *(slot for slot in hoarded[lane].tolist() if slot >= 0)]
            first = 50 - lengths[lane // layer.heads]
            assert sorted(slot for slot in slots if slot >= first) == list(range(first, 50))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_heard(family: str) -> None:
    """What resident and hoarded entries were given adds up to the queries there were: marks went along both ways."""
    ids, mask = padded([45])
    cache = KeepCache(tiny(family), "h2o:recent=0.2+hoard", BUDGET, chunk=CHUNK)
    queries: dict[int, int] = {}
    own = cache.stream.attend

    def attend(module: Any, query: Tensor, *args: Any) -> Tensor:
        source = cache.geometry.layers[module.layer_idx].source
        queries[source] = queries.get(source, 0) + query.shape[2]
        return own(module, query, *args)

    cache.stream.attend = attend
    ours = read(family, cache, ids, mask, 8)
    theirs = read(family, KeepCache(tiny(family), "full"), ids, mask, 8)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    assert cache.fate.brought
    for layer in selected(cache):
        (bank,) = layer.resident.banks
        _, _, slots, marks = cache.fate.held[layer.index]
        assert bank.scores is not None
        total = bank.scores.masked_fill(bank.slots < 0, 0).sum(1) + marks.masked_fill(slots < 0, 0).sum(1)
        torch.testing.assert_close(total, torch.full_like(total, queries[layer.index]), atol=1e-3, rtol=1e-4)


def test_what_is_lowest_leaves_first() -> None:
    """In each lane, of banks of different widths."""
    ids, mask = padded([150, 20])
    cache = KeepCache(tiny("llama"), "h2o:recent=0+hoard:0", 140, chunk=60)
    read("llama", cache, ids, mask, 1)
    layer = selected(cache)[0]
    assert len(layer.resident.banks) == 2
    ranks = exchange.lowest(layer, 130)
    for bank in layer.resident.banks:
        for own, lane in enumerate(bank.lanes.tolist()):
            marks = [m for m, slot in zip(bank.scores[own].tolist(), bank.slots[own].tolist(), strict=True) if slot >= 0]
            empty = bank.columns - len(marks)
            expected = ([float("-inf")] * empty + sorted(marks) + [float("inf")] * 130)[:130]
            torch.testing.assert_close(ranks[lane], torch.tensor(expected))


@pytest.mark.parametrize("method", ["h2o+hoard", "lru+hoard"])
def test_rollbacks_and_rows(method: str) -> None:
    ids, mask = padded([50, 50])
    cache, stock = KeepCache(tiny("llama"), method, BUDGET, chunk=CHUNK), DynamicCache(config=tiny("llama").config)
    for each in (cache, stock):
        read("llama", each, ids, mask, 4)
        each.crop(-7)
        each.reorder_cache(torch.tensor([1, 0]))
    ids = torch.cat([ids[[1, 0], :43], ids[:, :5]], 1)
    for low in range(43, 48):
        with torch.no_grad():
            ours, theirs = (
                tiny("llama")(ids[:, low : low + 1], past_key_values=each).logits for each in (cache, stock)
            )
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
