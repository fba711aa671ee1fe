"""The common part of the fates that merge neighbours by the next chunk's queries, as in the authors' code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.budget import MIN_CHUNK
from kvkeep.contracts.hook import PassHook
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError, UnsupportedModelError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.policies.fates.kvslimmer import MergesPairs
from kvkeep.policies.selectors.window import Window
from kvkeep_lab.published.ahead_pairs import AheadMerging
from kvkeep_lab.published.lookahead import Lookahead
from kvkeep_lab.published.merge_ahead import MergeAhead
from kvkeep_lab.published.split_heads import check_heads_together


@dataclass(frozen=True)
class NeighboursAhead(MergesPairs, AheadMerging):
    """A fate that merges the least attended neighbours by the queries of the next chunk, which is read twice. Each
    subclass has its file: a frozen dataclass with :meth:`sensitivity` and :meth:`weights`."""

    leaves: ClassVar[str] = "neighbours that the next chunk attends to least"
    stores: ClassVar[type[EvictedStore]] = MergeAhead

    def refuses(self, method: Any) -> str | None:
        if not isinstance(method.selector, Window):
            return (
                "The queries of the next chunk choose the pairs to merge, so the ranks of a selector have no "
                "effect; use selector 'window'."
            )
        if method.oneshot:
            return (
                "The queries of the next chunk decide what is merged, and with 'oneshot' the prompt has only one "
                "chunk; leave 'oneshot' out."
            )
        if method.recall.backed:
            return (
                "This fate reads each chunk twice, the second time against merged entries, which do not match the "
                "exact entries that a recall would bring back; leave the recall out."
            )
        return None

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        super().check(model, geometry)
        check_heads_together(model, "merging by the next chunk")
        if geometry.sliding_layers or geometry.recurrent_layers:
            what, one = ("sliding windows", "window") if geometry.sliding_layers else ("recurrent layers", "state")
            raise UnsupportedModelError(
                f"'{geometry.model_type}' has {what}, and this method reads a chunk twice, which a {one} cannot take "
                "back; use kvslimmer."
            )

    def chunk(self, name: str, entries: int, chunk: int, chosen: bool) -> int:
        taken = super().chunk(name, entries, chunk, chosen)
        self._check_chunk(name, entries, taken)
        return taken

    def check_room(self, name: str, entries: int) -> None:
        self._check_chunk(name, entries, MIN_CHUNK)

    def _check_chunk(self, name: str, entries: int, chunk: int) -> None:
        """Raise BudgetError if ``entries`` is too small for the sinks, a complete ``chunk`` and one merged entry."""
        least = self.sinks + chunk + self.pairs_at_once(entries) + 1
        if entries < least:
            raise BudgetError(
                f"A budget of {entries} entries leaves '{name}' too few to merge beside {self.sinks} sinks and a chunk "
                f"of {chunk} that stays whole; give at least {least}, or a smaller chunk or fewer sinks."
            )

    def store(self, site: Site, shared: Any) -> EvictedStore:
        how = self.beside(site.pinned)
        return MergeAhead(site, how, bind(site.model), how.pairs_at_once(min(site.budgets)))

    def hook(self) -> PassHook:
        return Lookahead(self.gradients)

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the temporary bytes of keys before rotation and of sums of values."""
        if not max(left, default=0):
            return PredictedBytes()
        return PredictedBytes(workspace=4 * entries * layer.kv_heads * (3 * layer.key_dim + 2 * layer.value_dim))
