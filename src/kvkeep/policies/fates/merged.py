"""``merge``: what leaves joins the resident entry that is most like it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from kvkeep.errors import UsageError
from kvkeep.policies.fates.base import Fate
from kvkeep.policies.fates.dropped import Forgetting
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.banks import Bank
from kvkeep.stores.joined import JoinedLayer, Leaving
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.selected import SelectedLayer


@dataclass(frozen=True)
class Merge(Fate):
    """What leaves joins a resident entry of its lane, which from then on counts for both: keys and values are means of
    all tokens that an entry stands for. ``by``: "key", the one with the most similar key (cosine, as cached), or
    "slot", the nearest in the text."""

    by: str = "key"

    label: ClassVar[str] = "merged"
    recall: ClassVar[str] = "never"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    layers: ClassVar[type[SelectedLayer]] = JoinedLayer

    def __post_init__(self) -> None:
        if self.by not in ("key", "slot"):
            raise UsageError(f"Entries are merged by 'key' or by 'slot', not by '{self.by}'.")

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return the one that merges."""
        return _Merging(self.by)


class _Merging(Forgetting):
    forgets = False

    def __init__(self, by: str) -> None:
        self.by = by

    def join(self, layer: int, heads: int, bank: Bank, left: Leaving) -> None:
        assert bank.others is not None and bank.newest is not None
        target = self.target(bank, left)
        counts = left.counts * (bank.slots[:, : bank.used] >= 0).any(1, keepdim=True)
        if target.shape[1] == 1:  # a decoded token moves one entry; a chunk may move all
            at, place = target, torch.zeros_like(target)
        else:
            at = torch.arange(bank.used, device=target.device).expand(len(target), -1)
            place = target
        held = 1 + bank.others.gather(1, at)
        total = held.scatter_add(1, place, counts)
        for rows, new in ((bank.keys, left.keys), (bank.values, left.values)):
            wide = at[..., None].expand(-1, -1, rows.shape[2])
            summed = rows.gather(1, wide).float() * held[..., None]
            summed = summed.scatter_add(1, place[..., None].expand_as(new), new.float() * counts[..., None])
            rows.scatter_(1, wide, (summed / total[..., None]).to(rows.dtype))
        bank.others.scatter_(1, at, total - 1)
        bank.newest.scatter_reduce_(1, target, left.newest.masked_fill(counts == 0, 0), "amax")

    def target(self, bank: Bank, left: Leaving) -> Tensor:
        """Return which column each of what leaves joins, (lanes, n) int64."""
        slots = bank.slots[:, None, : bank.used]
        if self.by == "slot":
            alike = -(slots - left.slots[..., None]).abs().float()
        else:
            held = bank.keys[:, : bank.used].float()
            # Cosines but for the length of what leaves, which all its candidates share.
            alike = left.keys.float() @ held.transpose(1, 2) / vector_norm(held, dim=-1)[:, None].clamp(min=1e-12)
        return alike.masked_fill(slots < 0, float("-inf")).argmax(2)
