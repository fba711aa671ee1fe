"""``merge``: what leaves joins the resident entry that is most like it."""

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
    """What leaves joins a resident entry of its lane, which from then on counts for both: keys and values are means of
    all tokens that an entry stands for. ``by``: "key", the one with the most similar key (cosine, as cached), or
    "slot", the nearest in the text."""

    by: str = "key"

    label: ClassVar[str] = "merged"
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.by not in ("key", "slot"):
            raise UsageError(f"Entries are merged by 'key' or by 'slot', not by '{self.by}'.")

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return MergeLikest(site, self.by)


class MergeLikest(MergeOnEvict):
    """Merges each entry into the one that is most like it, by "key" or by "slot"."""

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
        held = 1 + extra.gather(1, at)
        total = held.scatter_add(1, place, counts)
        for rows, new in ((bank.keys, left.keys), (bank.values, left.values)):
            wide = at[..., None].expand(-1, -1, rows.shape[2])
            summed = rows.gather(1, wide).float() * held[..., None]
            summed = summed.scatter_add(1, place[..., None].expand_as(new), new.float() * counts[..., None])
            rows.scatter_(1, wide, (summed / total[..., None]).to(rows.dtype))
        extra.scatter_(1, at, total - 1)
        newest.scatter_reduce_(1, target, newest_of(left).masked_fill(counts == 0, 0).to(newest.dtype), "amax")

    def target(self, bank: Bank, left: EvictedEntries) -> Tensor:
        """Return which column each of what leaves joins, (lanes, n) int64."""
        slots = bank.slots[:, None, : bank.used]
        if self.by == "slot":
            alike = -(slots - left.slots[..., None]).abs().float()
        else:
            held = bank.keys[:, : bank.used].float()
            # Cosines but for the length of what leaves, which all its candidates share.
            alike = left.keys.float() @ held.transpose(1, 2) / vector_norm(held, dim=-1)[:, None].clamp(min=1e-12)
        return alike.masked_fill(slots < 0, float("-inf")).argmax(2)
