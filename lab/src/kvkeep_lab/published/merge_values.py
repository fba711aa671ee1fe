"""``merge-values``: an evicted entry's value is merged into the value of a resident entry. kvpress calls this a
MergingPress (github.com/NVIDIA/kvpress, pull request 219)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.linalg import vector_norm

from kvkeep.contracts.entries import EvictedEntries
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UsageError
from kvkeep.policies.fates.merge import MergeOnEvict, most_similar
from kvkeep.policies.papers import Paper
from kvkeep.stores.resident.banks import Bank
from kvkeep_lab.published.papers import D2O


class MergeValue(MergeOnEvict):
    """Merges each value into that of the entry with the most similar key, which is not pinned."""

    def __init__(self, site: Site, least: float) -> None:
        super().__init__(site)
        self.least, self.pinned, self.heads = least, site.pinned, site.layer.kv_heads

    def merge(self, bank: Bank, left: EvictedEntries) -> None:
        first = self.ledger.first_by(self.heads)
        likeness, column = most_similar(bank, left.keys, self.pinned + (0 if first is None else bank.of(first)))
        likeness = likeness / vector_norm(left.keys.float(), dim=-1).clamp(min=1e-12)
        merges = (likeness > max(self.least, 0.0)) & (left.slots >= 0)
        old, gone = bank.values[:, : bank.used].float(), left.values.float()
        mine, its = vector_norm(gone, dim=-1), vector_norm(old, dim=-1).gather(1, column)
        weights = torch.where(merges, likeness * mine / (mine + its).clamp(min=1e-6), 0.0)
        total = torch.ones_like(old[..., 0]).scatter_add(1, column, weights)
        summed = old.scatter_add(1, column[..., None].expand_as(gone), gone * weights[..., None])
        bank.values[:, : bank.used] = (summed / total[..., None]).to(bank.values.dtype)
        last = left.slots if left.newest is None else torch.maximum(left.slots, left.newest)
        if bank.newest is None:
            bank.newest = torch.zeros_like(bank.slots)
        bank.newest.scatter_reduce_(1, column, last.masked_fill(~merges, 0).to(bank.newest.dtype), "amax")


@dataclass(frozen=True)
class MergeValues(Fate):
    """An evicted entry's value is merged into that of the resident entry of its lane with the most similar key. The
    weight of the evicted value is the cosine s of the keys times its share of both norms, w = s |u| / (|u| + |v|), and
    the value becomes (v + sum w u) / (1 + sum w). Keys and counts do not change."""

    least: float = 0.0
    """The cosine that a merged entry exceeds; those of other entries are dropped."""

    label: ClassVar[str] = "merged (values only)"
    source: ClassVar[str] = "MergingPress (kvpress, pull request 219), after arXiv:2406.13035"
    papers: ClassVar[Sequence[Paper]] = (D2O,)
    stores: ClassVar[type[EvictedStore]] = MergeValue

    def __post_init__(self) -> None:
        if not 0 <= self.least < 1:
            raise UsageError(f"Fate 'merge-values' takes a cosine ('least') from 0 to below 1, not {self.least:g}.")

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return MergeValue(site, self.least)
