"""The segments that promise most."""

from __future__ import annotations

from typing import Any

import torch
from kvkeep_lab.published.segments import Promising

from kvkeep.contracts.entries import EvictedEntries
from kvkeep.memory.meter import Meter
from kvkeep.stores.evicted.groups import GROUP, NewestGroups

NOBODY: Any = None


def test_the_most_promising_segments_are_those_with_the_highest_bound() -> None:
    """The largest of any query on the sum over channels of max(q min, q max), in each lane by itself."""
    generator, lanes, count = torch.Generator().manual_seed(0), 3, 20
    keys, values = (torch.randn(lanes, count * GROUP, 6, generator=generator) for _ in range(2))
    slots = torch.arange(count * GROUP, dtype=torch.int32).expand(lanes, -1)
    store = NewestGroups(None, Promising(4, Meter()))
    store.take(EvictedEntries(keys, values, slots), NOBODY)
    query = torch.randn(lanes, 2, 3, 6, generator=generator)
    (piece,) = store.pieces(query, NOBODY, count * GROUP)
    for lane in range(lanes):
        segments, asked = keys[lane].unflatten(0, (-1, GROUP)), query[lane].flatten(0, 1)
        low, high = segments.amin(1), segments.amax(1)  # (segments, dim)
        bound = torch.maximum(asked[:, None] * low, asked[:, None] * high).sum(2).amax(0)
        chosen = set((piece.slots[lane] // GROUP).tolist())
        assert chosen == set(bound.topk(4).indices.tolist())
        assert torch.equal(piece.keys[lane, 0], keys[lane, piece.slots[lane].long()])
        assert torch.equal(piece.values[lane, 0], values[lane, piece.slots[lane].long()])
