"""``kv-lru`` against a slow reference that replays use, eviction and recall in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from families import tiny
from helpers import forward
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import KeepCache

PAGE, FEW = 32, 8
Array = np.ndarray[Any, Any]


class Lane:
    """One KV head: which slots are resident, and when each was last used."""

    def __init__(self, budget: int, limit: int, threshold: float) -> None:
        self.budget, self.limit, self.threshold = budget, min(limit, budget // 2), threshold
        self.keys: list[Array] = []
        self.used: dict[int, int] = {}
        self.returned = 0

    def leave(self, count: int) -> None:
        for _ in range(count):
            del self.used[min(self.used, key=lambda slot: (self.used[slot], slot))]

    def step(self, queries: Array, keys: Array, scaling: float) -> None:
        """Take new ``keys`` (n, dim) with the queries (heads, n, dim) of their tokens."""
        count, before = len(keys), len(self.keys)
        self.keys += list(keys)
        now = len(self.keys)
        if count == 1:
            self.leave(max(0, len(self.used) + 1 - self.budget))
        self.used |= dict.fromkeys(range(before, now), now)
        everything = count > FEW
        attended = range(now) if everything else sorted(self.used)
        sums: dict[tuple[int, int], float] = {}
        for head in range(len(queries)):
            for number in range(count):
                query = queries[head, number]
                seen = [slot for slot in attended if slot <= before + number]
                scores = {slot: float(query @ self.keys[slot]) * scaling for slot in seen}
                top = max(scores.values())
                sums[head, number] = top + math.log(sum(math.exp(score - top) for score in scores.values()))
                for slot, score in scores.items():
                    if slot in self.used and math.exp(score - sums[head, number]) >= (self.threshold or 1 / now):
                        self.used[slot] = now
        if count > 1:
            self.leave(max(0, len(self.used) - self.budget))
        if not everything:
            self.recall(queries, sums, scaling)

    def recall(self, queries: Array, sums: dict[tuple[int, int], float], scaling: float) -> None:
        now, pages = len(self.keys), []
        for first in range(0, now, PAGE):
            page = np.stack(self.keys[first : first + PAGE])
            low, high = page.min(0), page.max(0)
            bound = max(
                float(np.maximum(queries[head, number] * low, queries[head, number] * high).sum()) * scaling - total
                for (head, number), total in sums.items()
            )
            if bound >= math.log(self.threshold or 1 / now):
                pages.append((-bound, first))
        missed = [
            slot for _, first in sorted(pages) for slot in range(first, min(first + PAGE, now)) if slot not in self.used
        ]
        coming = missed[: self.limit]
        self.leave(max(0, len(self.used) + len(coming) - self.budget))
        self.used |= dict.fromkeys(coming, now)
        self.returned = len(coming)


def replayed(method: str, budget: int, chunks: list[int], seed: int, limit: int, threshold: float, rows: int) -> int:
    """Hold every layer and lane against the reference after every step; return the most that came back at once."""
    model, largest = tiny("llama"), 0
    cache = KeepCache(model, method, budget, checkpoint="kv")
    cache.stream.chunk = 1000
    heads = 2
    lanes = [[Lane(budget, limit, threshold) for _ in range(rows * heads)] for _ in cache.layers]
    honest, generator = cache.stream.attend, torch.Generator().manual_seed(seed)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float) -> Any:
        nonlocal largest
        output, index = honest(module, query, key, value, mask, scaling), module.layer_idx
        grouped = query.unflatten(1, (heads, -1)).flatten(0, 1).double().numpy()
        flags = cache.layers[index].resident.resident_slots()
        for number, lane in enumerate(lanes[index]):
            lane.step(grouped[number], key.flatten(0, 1)[number].double().numpy(), scaling)
            where = f"layer {index}, lane {number}, {len(lane.keys)} slots"
            assert flags[number].nonzero().flatten().tolist() == sorted(lane.used), where
            largest = max(largest, lane.returned)
        return output

    cache.stream.attend = attend
    for count in chunks:
        forward(model, cache, torch.randn(rows, count, 32, generator=generator) * 0.3)
    return largest


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    budget=st.integers(16, 40),
    chunks=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    threshold=st.sampled_from([0.0, 0.03, 0.3]),
    limit=st.integers(0, 9),
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 2),
)
def test_lru_keeps_and_recalls_what_the_reference_does(
    budget: int, chunks: list[int], threshold: float, limit: int, seed: int, rows: int
) -> None:
    method = f"lru:threshold={threshold}+fetch-on-miss:limit={limit},threshold={threshold}"
    replayed(method, budget, [*chunks, *[1] * 6, 3, *[1] * 4], seed, limit, threshold, rows)


def test_kv_lru_recalls_at_most_64_entries() -> None:
    assert replayed("kv-lru", 160, [250, *[1] * 8], seed=1, limit=64, threshold=0.0, rows=1) == 64
