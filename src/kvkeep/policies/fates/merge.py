"""``merge``: an evicted entry is merged into the most similar resident one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from kvkeep.contracts.entries import EvictedEntries
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.site import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UsageError
from kvkeep.stores.evicted.merge_on_evict import MergeOnEvict, counts_of, newest_of
from kvkeep.stores.resident.banks import Bank


@dataclass(frozen=True)
class Merge(Fate):
    """An evicted entry is merged into a resident entry of its lane, which then stands for both: its key and value are
    means over all their tokens."""

    by: str = "key"
    """The entry to merge into: "key" is the entry with the most similar key (cosine, as cached), "slot" the nearest
    entry in the text."""

    label: ClassVar[str] = "merged"
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.by not in ("key", "slot"):
            raise UsageError(f"Fate 'merge' merges by 'key' or by 'slot', not by '{self.by}'.")

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return MergeLikest(site, self.by)


class MergeLikest(MergeOnEvict):
    """Merges each entry into the most similar one, by "key" or by "slot"."""

    def __init__(self, site: Site, by: str) -> None:
        super().__init__(site)
        self.by = by

    def merge(self, bank: Bank, left: EvictedEntries) -> None:
        extra, newest = bank.counted()
        target = self.target(bank, left)
        counts = counts_of(left) * (bank.slots[:, : bank.used] >= 0).any(1, keepdim=True)
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
        newest.scatter_reduce_(1, target, newest_of(left).masked_fill(counts == 0, 0).to(newest.dtype), "amax")

    def target(self, bank: Bank, left: EvictedEntries) -> Tensor:
        """Return the column into which each evicted entry is merged, (lanes, n) int64."""
        slots = bank.slots[:, None, : bank.used]
        if self.by == "slot":
            similarity = -(slots - left.slots[..., None]).abs().float()
        else:
            keys = bank.keys[:, : bank.used].float()
            # Cosines times the length of the evicted key, which is the same for all columns.
            similarity = left.keys.float() @ keys.transpose(1, 2) / vector_norm(keys, dim=-1)[:, None].clamp(min=1e-12)
        return similarity.masked_fill(slots < 0, float("-inf")).argmax(2)
