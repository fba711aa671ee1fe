"""Reselection: before a round drafts, the resident entries are chosen again from all entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.stores.resident.banks import Bank
from kvkeep.stores.resident.selected import Selected


def reselect(
    resident: Selected, weights: Tensor, queries: int, pick: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Choose the resident entries again from all slots, by ``weights`` (lanes, slots), the attention that they received
    from ``queries`` queries. pick: returns keys and values (n, dim) of single entries by lane and slot."""
    slots = torch.arange(resident.length, dtype=torch.int32, device=weights.device).expand(len(weights), -1)
    if (visible := resident.ledger.visible_by(resident.banks.heads)) is not None:
        slots = slots.masked_fill(~visible[:, 0, 0, : resident.length], -1)
        weights = weights.masked_fill(slots < 0, 0.0)
    moves = [_choose(resident, bank, bank.of(slots), bank.of(weights), queries) for bank in resident.banks]
    for bank, (lane, column, slot) in zip(resident.banks, moves, strict=True):
        source = lane if bank.lanes is None else bank.lanes[lane]
        bank.keys[lane, column], bank.values[lane, column] = pick(source, slot)


def _choose(
    resident: Selected, bank: Bank, slots: Tensor, weights: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Set the slots of ``bank``; return lane, column and slot of the entries that have to be fetched."""
    lanes, columns, device = len(slots), bank.columns, slots.device
    occupied = bank.slots >= 0
    where = torch.where(occupied, bank.slots, resident.length).long()  # empty columns: the additional last place
    scores = torch.zeros(lanes, resident.length + 1, device=device).scatter_(1, where, bank.scored())[:, :-1]
    entries = resident.ranking.candidates(bank, slots, scores, resident.length, queries)
    scores = resident.selector.observe(entries, weights, queries)
    rank = resident.selector.rank(replace(entries, scores=scores)).float().masked_fill(slots < 0, float("-inf"))
    best = rank.topk(min(columns, resident.length), dim=1, sorted=False)
    wanted = torch.zeros(lanes, resident.length + 1, dtype=torch.bool, device=device)
    wanted.scatter_(1, best.indices.masked_fill(best.values == float("-inf"), resident.length), True)
    wanted[:, -1] = False
    stays = wanted.gather(1, where)
    wanted.scatter_(1, where.masked_fill(~stays, resident.length), False)  # only entries that return
    lane, slot = wanted.nonzero(as_tuple=True)
    column = stays.int().argsort(dim=1, stable=True)[lane, wanted.cumsum(1)[lane, slot] - 1]
    bank.slots.masked_fill_(~stays, -1)
    bank.slots[lane, column] = slot.int()
    bank.scores = scores.gather(1, bank.slots.clamp(min=0).long())
    bank.used = columns
    bank.count_gaps()
    return lane, column, slot
