"""Evicted entries are merged into resident ones, which then stand for several tokens (:attr:`Bank.extra`)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from kvkeep.contracts.entries import EntryState, EvictedEntries
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.site import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.memory.ledger import Ledger
from kvkeep.stores.resident.banks import Bank


class MergeOnEvict(EvictedStore):
    """A store that keeps no entries: :meth:`merge` merges evicted entries into those of a bank."""

    merges = True

    def __init__(self, site: Site) -> None:
        self.ledger, self.meter, self.layer = site.ledger, site.meter, site.layer.index

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        with self.meter.merging():
            for bank in resident.banks:
                if bank.columns:  # a row of padding has no columns
                    self.merge(bank, EvictedEntries(*(None if part is None else bank.of(part) for part in left[:-1])))  # type: ignore[arg-type]

    @abstractmethod
    def merge(self, bank: Bank, left: EvictedEntries) -> None:
        """Merge the evicted entries ``left`` into those of a bank, and update ``bank.extra`` and ``bank.newest``, the
        last slot merged into an entry."""

    def states(self, lanes: int, length: int) -> Tensor:
        return merged_states(self.ledger, lanes, length)


def counts_of(left: EvictedEntries) -> Tensor:
    """Return the number of tokens that each entry stands for, (lanes, n) float32, 0 where there is no entry."""
    extra = 0 if left.extra is None else left.extra
    return (1.0 + extra) * (left.slots >= 0)


def newest_of(left: EvictedEntries) -> Tensor:
    """Return the last slot that each entry stands for, (lanes, n)."""
    return left.slots if left.newest is None else torch.maximum(left.slots, left.newest)


def merged_states(ledger: Ledger, lanes: int, length: int) -> Tensor:
    """Return codes (lanes, ``length``): merged, and for padding dropped."""
    codes = torch.full((lanes, length), EntryState.MERGED, dtype=torch.int8)
    if ledger.visible is not None and lanes:
        real = ledger.visible[:, :length].repeat_interleave(lanes // ledger.batch, 0).cpu()
        codes[:, : real.shape[1]].masked_fill_(~real, EntryState.DROPPED)
    return codes
