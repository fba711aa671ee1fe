"""Eviction: new entries of a bank are appended, replace the lowest-ranked entry, or compete with all entries; before
drafts, the resident entries are chosen again from all entries.

A single new entry replaces the lowest-ranked one before attention, so a decoding step attends to the budget's entries,
the new one included. The entries of a chunk are attended first, and then compete with the resident ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.contracts.entries import EvictedEntries, gathered
from kvkeep.contracts.selector import STAYS, Candidates, Selector
from kvkeep.memory.ledger import Ledger
from kvkeep.step import native
from kvkeep.step import torch as plain
from kvkeep.step.plan import Destination, LayerStep
from kvkeep.stores.resident.banks import Bank, Banks

# Ranks of empty columns are below every entry's, and rise by column: the first is filled first.
LOWEST, _STEP = -3e38, 1e33


@dataclass(frozen=True)
class Arriving:
    """New entries of one bank."""

    keys: Tensor
    """(lanes, n, dim)"""
    values: Tensor
    """(lanes, n, dim)"""
    numbers: Callable[[], Tensor]
    """Returns their slots, (lanes, n) int32, -1 for padding."""
    first: int
    """The slot of the first of them, padding included."""
    unpadded: bool
    """All entries are tokens, without padding."""
    scores: Tensor | None
    """(lanes, n) float32; None before the first score."""

    @functools.cached_property
    def slots(self) -> Tensor:
        """Their slots, computed on first use: most decoded tokens do not need them."""
        return self.numbers()

    @property
    def count(self) -> int:
        return self.keys.shape[1]


class Ranking:
    """A selector's view of the entries of one layer, and its ranks. scored: every entry has a score, even where the
    selector uses none. pinned: the number of first tokens of a row whose entries rank above all others; the selector
    has the rest of the budget."""

    def __init__(
        self, selector: Selector, banks: Banks, ledger: Ledger, layer: int, scored: bool, pinned: int = 0
    ) -> None:
        self.selector, self.banks, self.ledger, self.layer, self.scored = selector, banks, ledger, layer, scored
        self.pinned = pinned

    def candidates(
        self, bank: Bank | None, slots: Tensor, scores: Tensor | None, length: int, new: int = 0
    ) -> Candidates:
        """Return entries of a bank in the form for the selector. bank: None for all lanes. length: slots in all."""
        first = self.ledger.first_by(self.banks.heads)
        by_lane: Tensor | int = 0 if first is None else first if bank is None else bank.of(first)
        columns = self.banks.columns if bank is None else bank.columns
        budget = max(0, columns - self.pinned)
        number = self.ledger.number(length)
        return Candidates(slots, scores, by_lane, number, new, budget, self.banks.heads, self.layer)

    def rank(self, entries: Candidates) -> Tensor:
        """Return the selector's ranks; those of pinned entries are above all others."""
        ranks = self.selector.rank(entries)
        if not self.pinned:
            return ranks
        if not ranks.is_floating_point():
            return ranks.masked_fill(self.pins(entries), torch.iinfo(ranks.dtype).max)
        return ranks.clamp(max=torch.finfo(ranks.dtype).max).masked_fill(self.pins(entries), STAYS)

    def pins(self, entries: Candidates) -> Tensor:
        """Return which entries are pinned, (lanes, entries) bool; empty columns have arbitrary values."""
        return entries.slots < entries.first + self.pinned

    def arrived(self, bank: Bank, new: Arriving) -> Tensor | None:
        """Return the scores of new entries: those they have, or the selector's first ones. None if neither part needs
        scores."""
        if new.scores is not None:
            return new.scores
        if not self.selector.scores_arrivals:
            return torch.zeros(new.keys.shape[:2], device=new.keys.device) if self.scored else None
        return self.selector.arrive(self.candidates(bank, new.slots, None, new.first + new.count, new.count), new.keys)

    def joined(self, bank: Bank, new: Arriving, columns: int, scores: Tensor | None) -> Candidates:
        """Return the entries in the first ``columns`` of a bank and the new ones as one list. scores: the scores of the
        new entries, or None."""
        if scores is None and self.selector.observation_window != 0:
            scores = torch.zeros(new.slots.shape, device=new.keys.device)
        both = None if scores is None else torch.cat([bank.scored()[:, :columns], scores], 1)
        slots = torch.cat([bank.slots[:, :columns], new.slots], 1)
        entries = self.candidates(bank, slots, both, new.first + new.count, new.count)
        if not self.selector.needs_kv:
            return entries
        return replace(
            entries,
            keys=torch.cat([bank.keys[:, :columns], new.keys], 1),
            values=torch.cat([bank.values[:, :columns], new.values], 1),
        )

    def of(self, bank: Bank, length: int) -> Tensor:
        """Return the ranks of a bank's columns, (lanes, columns), of any dtype; empty columns have arbitrary ranks."""
        scores = bank.scored() if self.selector.observation_window != 0 else bank.scores
        entries = self.candidates(bank, bank.slots, scores, length)
        if self.selector.needs_kv:
            entries = replace(entries, keys=bank.keys[:, : bank.columns], values=bank.values[:, : bank.columns])
        return self.rank(entries)

    def with_gaps(self, bank: Bank, length: int) -> Tensor:
        bank.scored()
        return self.of(bank, length).float().masked_fill(bank.slots < 0, float("-inf"))

    def order(self, bank: Bank, length: int) -> Tensor:
        """Return the columns of a bank, (lanes, columns): empty ones, then entries in the order of eviction. Of equal
        ranks, the older entry comes first."""
        by_slot = bank.slots.argsort(dim=1, stable=True)
        return by_slot.gather(1, self.with_gaps(bank, length).gather(1, by_slot).argsort(dim=1, stable=True))


def append(bank: Bank, new: Arriving, scores: Tensor | None) -> None:
    """Write new entries without padding, where there is room for all of them."""
    span = slice(bank.used, bank.used + new.count)
    bank.keys[:, span], bank.values[:, span], bank.slots[:, span] = new.keys, new.values, new.slots
    bank.used = span.stop
    if scores is not None or bank.scores is not None:
        bank.scored()[:, span] = 0.0 if scores is None else scores


def replace_lowest(bank: Bank, new: Arriving, ranking: Ranking, wanted: bool) -> EvictedEntries | None:
    """Write a single new entry over the lowest-ranked one, as every decoded token does. Return the evicted entry if it
    is ``wanted``."""
    rank, gaps = ranking.of(bank, new.first + 1), bank.gaps > 0
    bank.gaps -= gaps
    scores = ranking.arrived(bank, new)
    if scores is not None or ranking.scored:
        bank.scored()
    if bank.scores is not None:
        bank.scores = bank.scores.contiguous()  # a selector may return an expanded tensor
    left = None
    if wanted:
        every = bank.entries(ranking.scored)._replace(gaps=gaps)
        left = every.each(lambda rows: rows.new_empty(len(rows), 1, *rows.shape[2:]))
    step = LayerStep(
        Destination(bank.keys, bank.values, 0, bank.slots, bank.scores, bank.extra, bank.newest),
        ranking.ledger.number(new.first),
        rank.contiguous(),
        ranking.selector.may_tie or ranking.scored,  # estimates that return may be equal
        None if scores is None else scores.float().contiguous().flatten(),
        None if left is None else Destination(left.keys, left.values, 0, *left[2:6]),
    )
    keys, values = new.keys[:, 0], new.values[:, 0]
    executor = native if native.can_insert(step, keys, values) else plain
    executor.insert(step, keys, values)
    return left


def compete(bank: Bank, new: Arriving, ranking: Ranking, wanted: bool) -> EvictedEntries | None:
    """Rank the resident and the new entries of a full bank together, and evict one for each new entry. Return the
    evicted entries if they are ``wanted``."""
    lanes, count, columns, device = new.keys.shape[0], new.count, bank.columns, new.keys.device
    scores = ranking.arrived(bank, new)
    entries = ranking.joined(bank, new, columns, scores)
    rank = ranking.rank(entries).float()
    # Padding is evicted first, then empty columns, then entries.
    rank[:, :columns] = torch.where(
        bank.slots < 0, torch.arange(columns, device=device) * _STEP + LOWEST, rank[:, :columns]
    )
    rank[:, columns:].masked_fill_(new.slots < 0, float("-inf"))
    # The older of two entries of equal rank is evicted, whatever their columns.
    by_slot = entries.slots.argsort(1)
    order = rank.gather(1, by_slot).argsort(dim=1, stable=True)[:, :count]
    leaving = by_slot.gather(1, order).sort(1).values
    refused = leaving >= columns
    gone = leaving
    if new.unpadded and not bank.gaps and bank.used < columns:  # drops the empty columns, which have no entries
        gone = leaving[(leaving < bank.used) | refused].view(lanes, -1)
    left = _leaving(bank, new, gone, entries.scores if ranking.scored else None) if wanted else None
    stays = torch.ones(lanes, columns + count, dtype=torch.bool, device=device).scatter_(1, leaving, False)
    order = (~stays[:, columns:]).int().argsort(dim=1, stable=True)  # new entries that stay come first, in order
    lane, number = (~refused).nonzero(as_tuple=True)
    target, source = leaving[lane, number], order[lane, number]
    bank.keys[lane, target], bank.values[lane, target] = new.keys[lane, source], new.values[lane, source]
    bank.slots[lane, target] = new.slots[lane, source]
    bank.used = columns
    if scores is not None:
        bank.scored()[lane, target] = scores[lane, source]
    for counted in (bank.extra, bank.newest):
        if counted is not None:
            counted[lane, target] = 0
    bank.count_gaps()
    return left


def _leaving(bank: Bank, new: Arriving, leaving: Tensor, scores: Tensor | None) -> EvictedEntries:
    """Return the entries at ``leaving`` (lanes, n), which counts the columns of the bank, then the new entries."""
    refused, old = leaving >= bank.columns, bank.entries(False).at(leaving.clamp(max=bank.columns - 1))

    def joined(kept: Tensor, fresh: Tensor) -> Tensor:
        coming = gathered(fresh, (leaving - bank.columns).clamp(min=0))
        return torch.where(refused.view(*refused.shape, *(1,) * (kept.ndim - 2)), coming, kept)

    keys, values, slots = map(joined, old[:3], (new.keys, new.values, new.slots))
    extra, newest = (None if one is None else one.masked_fill(refused, 0) for one in (old.extra, old.newest))
    picked = None if scores is None else scores.gather(1, leaving)
    return EvictedEntries(keys, values, slots, picked, extra, newest, not new.unpadded or bank.gaps > 0)


def reselect(
    resident: Any, weights: Tensor, queries: int, pick: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    """Choose the entries of ``resident``, a :class:`~kvkeep.stores.resident.selected.Selected`, again from all slots,
    by ``weights`` (lanes, slots), the attention that they received from ``queries`` queries. pick: returns keys and
    values (n, dim) of single entries by lane and slot."""
    slots = torch.arange(resident.length, dtype=torch.int32, device=weights.device).expand(len(weights), -1)
    if (visible := resident.ledger.visible_by(resident.banks.heads)) is not None:
        slots = slots.masked_fill(~visible[:, 0, 0, : resident.length], -1)
        weights = weights.masked_fill(slots < 0, 0.0)
    moves = [_choose(resident, bank, bank.of(slots), bank.of(weights), queries) for bank in resident.banks]
    for bank, (lane, column, slot) in zip(resident.banks, moves, strict=True):
        source = lane if bank.lanes is None else bank.lanes[lane]
        bank.keys[lane, column], bank.values[lane, column] = pick(source, slot)


def _choose(resident: Any, bank: Bank, slots: Tensor, weights: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Set the slots of ``bank``; return lane, column and slot of the entries that have to be fetched."""
    lanes, columns, device = len(slots), bank.columns, slots.device
    occupied = bank.slots >= 0
    where = torch.where(occupied, bank.slots, resident.length).long()  # empty columns: the additional last place
    scores = torch.zeros(lanes, resident.length + 1, device=device).scatter_(1, where, bank.scored())[:, :-1]
    entries = resident.ranking.candidates(bank, slots, scores, resident.length, queries)
    scores = resident.selector.observe(entries, weights, queries)
    rank = resident.ranking.rank(replace(entries, scores=scores)).float().masked_fill(slots < 0, float("-inf"))
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
