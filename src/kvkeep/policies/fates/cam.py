"""``cam``: the values of what leaves go into the next entries that stay, with chance (CaM, Zhang et al., ICML 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvkeep.contracts import Evicted, EvictedStore, Fate, Held, Selector, Site
from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.selectors.random import check_seed, sampled
from kvkeep.stores.banks import Bank
from kvkeep.stores.merge_on_evict import MergeOnEvict, newest_of


@dataclass(frozen=True)
class Cam(Fate):
    """An entry's value is spread evenly over the ``into`` next entries that stay, with probability clamp(A / mean of
    their A, 0, 1), A being the attention that the selector scored; keys are left as they are. The chance is drawn
    from ``seed``, layer, head and slot alone."""

    into: int = 32
    seed: int = 0

    label: ClassVar[str] = "values merged by chance"
    source: ClassVar[str] = "CaM (Zhang et al., ICML 2024)"
    work: ClassVar[str] = "merged"
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.into < 1:
            raise UsageError(f"A value goes into one entry at least, not {self.into}.")
        check_seed(self.seed)

    def refuses(self, selector: Selector) -> str | None:
        if selector.observation_window == 0:
            return "There is no attention to merge by: 'cam' needs a selector that observes it, as h2o does."
        return None

    def store(self, site: Site, shared: Any) -> EvictedStore:
        return MergeByChance(site, self.into, self.seed)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> Held:
        """Return the bytes of the parts of values that are spread, for a moment."""
        parts = max(left, default=0) * self.into * layer.value_dim
        return Held(workspace=layer.kv_heads * parts * geometry.dtype_bytes)


class MergeByChance(MergeOnEvict):
    """Merges the values of some entries into those after them."""

    def __init__(self, site: Site, into: int, seed: int) -> None:
        super().__init__(site)
        self.into, self.seed, self.heads = into, seed, site.layer.kv_heads

    def merge(self, bank: Bank, left: Evicted) -> None:
        assert bank.newest is not None and left.scores is not None
        slots, order = bank.slots[:, : bank.used].sort(1)
        first = torch.searchsorted(slots, left.slots.to(slots.dtype).contiguous(), right=True)[..., None]
        into = first + torch.arange(self.into, device=first.device)
        there = (into < bank.used) & (left.slots[..., None] >= 0)
        columns = order.gather(1, into.clamp(max=bank.used - 1).flatten(1))
        weights = bank.scored().gather(1, columns).view_as(there) * there
        count = there.sum(2).clamp(min=1)
        chance = left.scores / (weights.sum(2) / count)
        goes = sampled(left.slots, self.heads, self.layer, self.seed) < chance.nan_to_num(0.0)
        there = there & goes[..., None]
        share = (there / count[..., None]).to(left.values.dtype)
        parts = (left.values[:, :, None] * share[..., None]).flatten(1, 2)
        with self.meter.holding(parts):
            bank.values.scatter_add_(1, columns[..., None].expand_as(parts), parts)
        newest = torch.where(there, newest_of(left)[..., None], 0).flatten(1).to(bank.newest.dtype)
        bank.newest.scatter_reduce_(1, columns, newest, "amax")
