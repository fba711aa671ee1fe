"""Entries that come back: from the log of a logged layer, or from a fate that heard of attention to them; and entries
of a logged layer that leave before they have to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep.stores.banks import Bank, Gone

if TYPE_CHECKING:
    from kvkeep.stores.logged import LoggedLayer
    from kvkeep.stores.selected import SelectedLayer


def compact(wanted: Tensor) -> Tensor:
    """Return the slots that are marked, (lanes, n) with n the most of any lane, -1 behind a lane's last; ``wanted``:
    (lanes, slots) bool."""
    counts = wanted.sum(1)
    slot = wanted.nonzero(as_tuple=True)[1]
    width = int(counts.max()) if len(counts) else 0
    if len(slot) == width * len(counts):
        return slot.view(len(counts), width)
    slots = slot.new_full((len(counts), width), -1)
    slots[torch.arange(width, device=slot.device) < counts[:, None]] = slot
    return slots


def fetched(layer: LoggedLayer, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (lanes, n, dim) of ``slots`` (lanes, n) from the log; zeros where a slot is -1."""
    there = slots >= 0
    lane, _ = there.nonzero(as_tuple=True)
    picked = layer.log.pick(layer.index, lane, slots[there])
    if len(lane) == slots.numel():
        return picked[0].view(*slots.shape, -1), picked[1].view(*slots.shape, -1)
    whole = tuple(part.new_zeros(*slots.shape, part.shape[-1]) for part in picked)
    for rows, part in zip(whole, picked, strict=True):
        rows[there] = part
    return whole[0], whole[1]


def away(layer: LoggedLayer) -> Tensor:
    """Return which slots can come back: in the log, not resident, not padding; (lanes, slots) bool."""
    flags = ~layer.held()
    if layer.visible is not None:
        flags &= layer.visible[:, 0, 0, : layer.length]
    flags[:, : layer.log.first(layer.index)] = False
    return flags


def evict(layer: LoggedLayer, count: int) -> None:
    """Let the ``count`` lowest-ranked resident entries of every lane leave; they are in the log."""
    for bank in layer.banks:
        leaving = _order(layer, bank)
        empty = (bank.slots < 0).sum(1, keepdim=True)
        place = torch.arange(bank.columns, device=leaving.device) < empty + count
        gone = torch.zeros(bank.slots.shape, dtype=torch.bool, device=leaving.device).scatter_(1, leaving, place)
        bank.slots.masked_fill_(gone, -1)
        bank.vacant = int((bank.slots[:, : bank.used] < 0).sum(1).max())


def recall(layer: LoggedLayer, slots: Tensor, limit: int) -> int:
    """Make those of ``slots`` (n,) resident that can come back, the first ``limit`` of every lane; return how many that
    were in all."""
    if not layer.banks or not layer.length or not len(slots):
        return 0
    wanted = away(layer)[:, slots]
    wanted &= wanted.cumsum(1) <= min(limit, *(bank.columns for bank in layer.banks))
    chosen = compact(wanted)
    if chosen.shape[1]:
        slots = slots[chosen.clamp(min=0)].masked_fill(chosen < 0, -1)
        bring(layer, slots, *fetched(layer, slots))
    return int(wanted.sum())


def lowest(layer: SelectedLayer, count: int) -> Tensor:
    """Return the ranks of those entries of every lane that would leave first, (lanes, ``count``) float32, ascending:
    -inf for an empty column, inf where a lane has no more."""
    ranks = torch.full((layer.lanes, count), float("inf"), device=layer.banks[0].slots.device)
    for bank in layer.banks:
        own = _ranks(layer, bank)
        own = own.topk(min(count, bank.columns), dim=1, largest=False).values
        ranks[slice(None) if bank.lanes is None else bank.lanes, : own.shape[1]] = own
    return ranks


def bring(layer: SelectedLayer, slots: Tensor, keys: Tensor, values: Tensor, marks: Tensor | None = None) -> None:
    """Make entries resident: ``slots`` (lanes, n), none of which is, -1 for none; keys and values (lanes, n, dim);
    marks (lanes, n), by default those of new entries. In each lane they take empty columns, then those of the entries
    that rank lowest, which are handed to the fate; there can be no more of them than the lane has columns."""
    left: list[tuple[Bank, Gone]] = []
    for bank in layer.banks:
        own = bank.of(slots)[:, : bank.columns]
        columns = _order(layer, bank)[:, : own.shape[1]]
        if not layer.fate.forgets:
            gone = bank.at(columns, layer.listener is not None)
            left.append((bank, gone._replace(slots=gone.slots.masked_fill(own < 0, -1))))
        lane, number = (own >= 0).nonzero(as_tuple=True)
        column = columns[lane, number]
        own_keys, own_values = bank.of(keys), bank.of(values)
        bank.keys[lane, column], bank.values[lane, column] = own_keys[lane, number], own_values[lane, number]
        bank.slots[lane, column] = own[lane, number].int()
        own_marks = None if marks is None else bank.of(marks)
        if own_marks is None and layer.selector.enters:
            own_marks = layer.selector.enter(layer.candidates(bank, own, None, layer.length, own.shape[1]), own_keys)
        if own_marks is not None:
            bank.noted()[lane, column] = own_marks[lane, number].float()
        elif bank.marks is not None:
            bank.marks[lane, column] = 0.0
        if len(column):
            bank.used = max(bank.used, int(column.max()) + 1)
        bank.vacant = int((bank.slots[:, : bank.used] < 0).sum(1).max()) if bank.used else 0
    if left:
        layer.hand_over(left)


def _order(layer: SelectedLayer, bank: Bank) -> Tensor:
    """Return the columns of a bank, (lanes, columns): empty ones, then entries in the order in which they leave."""
    by_slot = bank.slots.argsort(dim=1, stable=True)
    return by_slot.gather(1, _ranks(layer, bank).gather(1, by_slot).argsort(dim=1, stable=True))


def _ranks(layer: SelectedLayer, bank: Bank) -> Tensor:
    """Return the ranks of a bank's columns, (lanes, columns) float32, -inf where they are empty."""
    entries = layer.candidates(bank, bank.slots, bank.noted(), layer.length)
    if layer.selector.reads:
        entries = replace(entries, keys=bank.keys[:, : bank.columns], values=bank.values[:, : bank.columns])
    return layer.selector.rank(entries).float().masked_fill(bank.slots < 0, float("-inf"))
