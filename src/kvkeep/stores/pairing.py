"""Neighbours that do not overlap: which pairs of a row of entries to merge at once."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 12
"""Rounds of taking all local minima; after so many, what is undecided waits for the next pass."""


def cheapest_pairs(cost: Tensor, wanted: Tensor) -> Tensor:
    """Return which pairs to take: (lanes, n) bool, pair i being entries i and i + 1.

    cost: (lanes, n), inf for pairs that must not be. wanted: (lanes, 1), how many at most. No two of the chosen share
    an entry, and they are those that a greedy choice by cost would take, first come first served where costs tie: a
    pair that is cheaper than both its neighbours is greedy's, so all such are taken at once, their neighbours struck,
    and so on.
    """
    chosen = torch.zeros(cost.shape, dtype=torch.bool, device=cost.device)
    left = cost.clone()
    for _ in range(ROUNDS):
        padded = torch.nn.functional.pad(left, (1, 1), value=float("inf"))
        least = (left < padded[:, :-2]) & (left <= padded[:, 2:]) & (left < float("inf"))
        chosen |= least
        beside = torch.nn.functional.pad(least, (1, 1))
        left = left.masked_fill(least | beside[:, :-2] | beside[:, 2:], float("inf"))
    order = cost.masked_fill(~chosen, float("inf")).argsort(dim=1, stable=True).argsort(1)
    return chosen & (order < wanted)
