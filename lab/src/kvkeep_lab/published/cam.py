"""``cam``: while decoding, adds the value of an evicted entry to the next entries with a probability (CaM, ICML 2024).

Details that the paper does not specify follow the authors' code for Llama (github.com/zyxxmu/cam, cam_hf/utils_hh).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvkeep.contracts.entries import EvictedEntries
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.resident import WorkingSet
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.fates.merge import MergeOnEvict
from kvkeep.policies.papers import Paper
from kvkeep.policies.selectors.random import check_seed, sampled
from kvkeep.stores.resident.banks import Bank
from kvkeep_lab.published.papers import CAM
from kvkeep_lab.published.split_heads import check_heads_together


class MergeByChance(MergeOnEvict):
    """Adds the values of evicted entries to later ones. A rollback that removes an entry also removes the entries that
    its value was added to, because :attr:`Bank.newest` is never later than an entry's slot."""

    watches = True

    def __init__(self, site: Site, into: int, seed: int) -> None:
        super().__init__(site)
        self.into, self.seed, self.heads = into, seed, site.layer.kv_heads

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        """Merge the entry that a decoded token evicts; entries evicted by a chunk are dropped."""
        if left.slots.shape[1] == 1:
            super().take(left, resident)

    def merge(self, bank: Bank, left: EvictedEntries) -> None:
        assert left.scores is not None
        slots, order = bank.slots[:, : bank.used].sort(1)
        newest = slots[:, -1:]  # it arrived in this step and has received no attention
        after = (slots > left.slots) & (slots < newest) & (left.slots >= 0)  # (lanes, used)
        attention = bank.scored().gather(1, order)
        mean = (attention * after).sum(1, keepdim=True) / after.sum(1, keepdim=True)
        goes = sampled(left.slots, self.heads, self.layer, self.seed) < (left.scores / mean).nan_to_num(0.0)
        first = after.int().argmax(1, keepdim=True)
        into = (first + torch.arange(self.into, device=first.device)).clamp(max=bank.used - 1)
        there = after.gather(1, into) & goes & (into.diff(dim=1, prepend=into[:, :1] - 1) > 0)
        parts = there[..., None].to(left.values.dtype) * (left.values / self.into)
        with self.meter.holding(parts):
            columns = order.gather(1, into)
            bank.values.scatter_add_(1, columns[..., None].expand_as(parts), parts)

    states = EvictedStore.states  # keys are dropped; values may be part of other entries


@dataclass(frozen=True)
class Cam(Fate):
    """While decoding, the value of an evicted entry is added, divided by ``into``, to the ``into`` entries after it,
    with probability clamp(a / mean a', 0, 1): a its attention in the last step, a' that of all entries after it. Keys
    and counts do not change, and entries evicted during a prompt are dropped. The random numbers depend only on
    ``seed``, layer, head and slot."""

    into: int = 32
    """Number of entries that the value is added to."""
    seed: int = 0
    """Seed of the samples, an integer of 24 bits."""

    label: ClassVar[str] = "merged (values only, at random)"
    source: ClassVar[str] = "CaM (Zhang et al., ICML 2024)"
    papers: ClassVar[Sequence[Paper]] = (CAM,)
    stores: ClassVar[type[EvictedStore]] = MergeByChance

    def __post_init__(self) -> None:
        if self.into < 1:
            raise UsageError(f"Fate 'cam' adds a value to at least 1 entry, not {self.into}.")
        check_seed(self.seed)

    def refuses(self, method: Any) -> str | None:
        selector = method.selector
        if selector.observation_window in (0, 1) and not selector.scores_arrivals:
            return None
        return (
            "Fate 'cam' needs scores that are the attention of the last step, and the scores of this selector "
            "are something else; use streaming-llm, window or tova."
        )

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        check_heads_together(model, "fate 'cam'")  # samples depend on the number of the head

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return MergeByChance(site, self.into, self.seed)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the temporary bytes of the terms added to values."""
        parts = self.into * layer.value_dim if 1 in left else 0
        return PredictedBytes(workspace=layer.kv_heads * parts * geometry.dtype_bytes)
