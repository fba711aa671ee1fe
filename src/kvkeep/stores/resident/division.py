"""A layer's budget, divided between its lanes anew whenever a chunk overflows it (``adakv``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.contracts.entries import EvictedEntries
from kvkeep.stores.resident.banks import Bank
from kvkeep.stores.resident.eviction import Arriving


def divide(resident: Any, parts: Sequence[Arriving]) -> EvictedEntries | None:
    """Divide the budget of ``resident``, a :class:`~kvkeep.stores.resident.selected.Selected`, between its lanes anew,
    and keep in each the entries of the highest ranks. Return the others if the store wants them. parts: the new entries
    of each bank."""
    banks, selector, store, joined = resident.banks, resident.selector, resident.store, []
    for bank, new in zip(banks, parts, strict=True):
        if store.merges:
            bank.counted()
        scores = resident.ranking.arrived(bank, new)
        if scores is None and resident.window != 0:
            scores = torch.zeros(new.slots.shape, device=new.keys.device)
        joined.append(_with_new(bank, new, scores))
    length, pinned = parts[0].first + parts[0].count, resident.ranking.pinned
    mean = sum(banks.budgets) // len(banks.budgets) - pinned
    with resident.meter.holding(*(tensor for part in joined for tensor in part[:-1])):
        every = banks.gathered(joined)
        assert every is not None
        entries = resident.ranking.candidates(None, every.slots, every.scores, length, parts[0].count)
        entries = replace(entries, budget=mean, keys=every.keys, values=every.values)
        ranks = resident.ranking.rank(entries).float().masked_fill(every.slots < 0, float("-inf"))
        others = ranks.masked_fill(resident.ranking.pins(entries), float("-inf")) if pinned else ranks
        shares = [pinned + count for count in selector.shares([others], resident.ledger.batch, mean)[0]]
        with resident.meter.holding(*(every[:-1] if len(joined) > 1 else ())):
            stays = banks.refill(every, ranks, shares)
    return _some(every, ~stays & (every.slots >= 0), resident.ranking.scored) if store.keeps else None


def _with_new(bank: Bank, new: Arriving, scores: Tensor | None) -> EvictedEntries:
    """Return copies of a bank's entries and of the new ones, in one list. scores: of the new ones, (lanes, n)."""
    old = bank.entries(scores is not None).each(lambda rows: rows[:, : bank.used])
    every = (
        None
        if one is None
        else torch.nn.functional.pad(one, (0, new.count))
        if fresh is None
        else torch.cat([one, fresh], 1)
        for one, fresh in zip(old[:-1], (new.keys, new.values, new.slots, scores, None, None), strict=True)
    )
    return EvictedEntries(*every)  # type: ignore[arg-type]


def _some(entries: EvictedEntries, chosen: Tensor, scored: bool) -> EvictedEntries:
    """Return the ``chosen`` entries, (lanes, n) bool, in their order. scored: with scores."""
    counts = chosen.sum(1)
    columns = (~chosen).int().argsort(dim=1, stable=True)[:, : int(counts.max())]
    left = entries._replace(scores=entries.scores if scored else None).at(columns)
    slots = left.slots.masked_fill(~chosen.gather(1, columns), -1)
    return left._replace(slots=slots, gaps=not bool((counts == counts[0]).all()))
