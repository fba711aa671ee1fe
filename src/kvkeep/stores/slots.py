"""Slots of entries by lane: lists of them, and flags."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState
from kvkeep.memory.ledger import Ledger


def compact(wanted: Tensor) -> Tensor:
    """Return the slots marked in ``wanted`` (lanes, slots) bool: (lanes, n), where n is the largest number of any lane,
    -1 behind a lane's last slot."""
    counts = wanted.sum(1)
    slot = wanted.nonzero(as_tuple=True)[1]
    width = int(counts.max()) if len(counts) else 0
    if len(slot) == width * len(counts):
        return slot.view(len(counts), width)
    slots = slot.new_full((len(counts), width), -1)
    slots[torch.arange(width, device=slot.device) < counts[:, None]] = slot
    return slots


def codes_of(lanes: int, length: int, places: Iterable[tuple[Tensor, int]]) -> Tensor:
    """Return int8 codes of ``length`` slots by lane, on the CPU. places: pairs of slots (lanes, n), -1 for none, and
    their code. All other slots have the code 0."""
    codes = torch.zeros(lanes, length + 1, dtype=torch.int8)
    for slots, code in places:
        index = slots.cpu().long()
        codes.scatter_(1, index.masked_fill((index < 0) | (index > length), length), int(code))
    return codes[:, :length]


def merged_states(ledger: Ledger, lanes: int, length: int) -> Tensor:
    """Return codes (lanes, ``length``): merged, and for padding dropped."""
    codes = torch.full((lanes, length), EntryState.MERGED, dtype=torch.int8)
    if ledger.visible is not None and lanes:
        real = ledger.visible[:, :length].repeat_interleave(lanes // ledger.batch, 0).cpu()
        codes[:, : real.shape[1]].masked_fill_(~real, EntryState.DROPPED)
    return codes
