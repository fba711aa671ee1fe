"""Merging on eviction: an evicted entry is merged into a resident one, which then stands for several tokens
(:attr:`Bank.extra`). ``merge``: into the most similar one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from kvkeep.contracts.entries import EvictedEntries
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import Site
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.stores.resident.banks import Bank
from kvkeep.stores.slots import merged_states


class MergeOnEvict(EvictedStore):
    """A store that keeps no entries: :meth:`merge` merges evicted entries into those of a bank."""

    merges = True

    def __init__(self, site: Site) -> None:
        self.ledger, self.meter, self.layer = site.ledger, site.meter, site.layer.index

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        with self.meter.merging():
            for bank in resident.banks:
                if bank.columns:  # a row of padding has no columns
                    self.merge(bank, left.each(bank.of))

    @abstractmethod
    def merge(self, bank: Bank, left: EvictedEntries) -> None:
        """Merge the evicted entries ``left`` into those of a bank, and update ``bank.extra`` and ``bank.newest``, the
        last slot merged into an entry."""

    def states(self, lanes: int, length: int) -> Tensor:
        return merged_states(self.ledger, lanes, length)


class MergeLikest(MergeOnEvict):
    """Merges each entry into the one with the most similar key, which is not pinned."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.pinned, self.heads = site.pinned, site.layer.kv_heads

    def merge(self, bank: Bank, left: EvictedEntries) -> None:
        extra, newest = bank.counted()
        first = self.ledger.first_by(self.heads)
        target = most_similar(bank, left.keys, self.pinned + (0 if first is None else bank.of(first)))[1]
        counts = (1.0 if left.extra is None else 1.0 + left.extra) * (left.slots >= 0)  # tokens of each entry
        counts = counts * (bank.slots[:, : bank.used] >= 0).any(1, keepdim=True)
        if target.shape[1] == 1:  # a decoded token moves one entry; a chunk may move all
            at, place = target, torch.zeros_like(target)
        else:
            at = torch.arange(bank.used, device=target.device).expand(len(target), -1)
            place = target
        before = 1 + extra.gather(1, at)
        total = before.scatter_add(1, place, counts)
        for rows, new in ((bank.keys, left.keys), (bank.values, left.values)):
            wide = at[..., None].expand(-1, -1, rows.shape[2])
            summed = rows.gather(1, wide).float() * before[..., None]
            summed = summed.scatter_add(1, place[..., None].expand_as(new), new.float() * counts[..., None])
            rows.scatter_(1, wide, (summed / total[..., None]).to(rows.dtype))
        extra.scatter_(1, at, total - 1)
        last = left.slots if left.newest is None else torch.maximum(left.slots, left.newest)
        newest.scatter_reduce_(1, target, last.masked_fill(counts == 0, 0).to(newest.dtype), "amax")


def most_similar(bank: Bank, keys: Tensor, first: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return the cosine of each of ``keys`` (lanes, n, dim) and the most similar key of the bank, times the length of
    the former, (lanes, n) float32, and the column of the latter, (lanes, n) int64. first: the first slot of each lane
    that is compared, (lanes, 1); -inf where there is none."""
    columns = bank.keys[:, : bank.used].float()
    similarity = keys.float() @ columns.transpose(1, 2) / vector_norm(columns, dim=-1)[:, None].clamp(min=1e-12)
    compared = bank.slots[:, : bank.used] >= first
    found = similarity.masked_fill(~compared[:, None], float("-inf")).max(2)
    return found.values, found.indices


@dataclass(frozen=True)
class Merge(Fate):
    """An evicted entry is merged into the resident entry of its lane with the most similar key (cosine, as cached),
    which then stands for both: its key and value are means over all their tokens."""

    label: ClassVar[str] = "merged"
    stores: ClassVar[type[EvictedStore]] = MergeLikest

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return MergeLikest(site)
