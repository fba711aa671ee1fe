"""The common part of ``asymkv`` and ``kvslimmer-exact``: neighbours are merged by the attention of the last queries,
which is computed again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.resident import WorkingSet
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.extent import Extent, fits, within
from kvkeep.models.adapter import Adapter
from kvkeep.policies.fates.kvslimmer import Neighbours
from kvkeep.stores.evicted.neighbours import MergeNeighbours
from kvkeep.stores.evicted.pairs import OrderedEntries
from kvkeep.stores.resident.banks import Bank

QUERIES = 32
"""Number of queries kept while decoding."""

BLOCK = 128
"""Number of queries of one head whose weights are in memory at the same time."""

GRADIENTS = 4
"""Number of matrices of that size in memory at the same time: scores, weights, and the gradients of both."""


@dataclass(frozen=True)
class Queries:
    """The last queries of a layer and all its entries, float32, as inputs of a gradient."""

    query: Tensor
    """Queries of all heads of the group, (lanes, queries, dim)."""
    keys: Tensor
    """Keys, (lanes, entries, dim)."""
    values: Tensor
    """Values, (lanes, entries, dim)."""
    bias: Tensor
    """Term added to the scores, (lanes, queries, entries): the logarithm of the counts, or a very large negative number
    if the query precedes the entry."""
    real: Tensor
    """1, or 0 for padding, (lanes, queries, 1)."""
    scaling: float
    """Factor of the scores."""
    block: int
    """Number of queries whose weights are in memory at the same time."""

    def weights(self, keys: Tensor) -> Tensor:
        """Return the attention weights with ``keys``, (lanes, queries, entries)."""
        return torch.baddbmm(self.bias, self.query, keys.transpose(1, 2), alpha=self.scaling).softmax(-1)

    def blocks(self) -> Iterator[Queries]:
        """Yield parts with :attr:`block` queries each."""
        parts = zip(*(part.split(self.block, 1) for part in (self.query, self.bias, self.real)), strict=True)
        return (replace(self, query=query, bias=bias, real=real) for query, bias, real in parts)


class MergeByQueries(MergeNeighbours):
    """Keeps a chunk's queries until its entries are merged, and then the last :data:`QUERIES`.

    asked: the queries of the last n slots, (lanes, heads of the group, n, dim). scaling: factor of their scores.
    """

    by_lane = (*MergeNeighbours.by_lane, "asked")
    how: NeighboursByQueries

    def __init__(self, site: Site, how: NeighboursByQueries, adapter: Adapter, slack: int) -> None:
        super().__init__(site, how, adapter, slack)
        self.queried = site.geometry.attention_heads // site.layer.kv_heads  # query heads per lane
        self.asked: Tensor | None = None
        self.scaling = 1.0

    def attended(self, step: AttentionInputs, output: Tensor, resident: WorkingSet) -> None:
        self.scaling, self.group, self.heads = step.scaling, step.query.shape[1], step.heads
        if self.asked is None or step.queries >= QUERIES or not step.brings_entries:
            self.asked = step.query
        else:
            self.asked = torch.cat([self.asked[:, :, step.queries - QUERIES :], step.query], 2)

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        super().settled(observed, resident)
        if self.asked is not None and self.asked.shape[2] > QUERIES:
            self.asked = self.asked[:, :, -QUERIES:].clone()

    @torch.inference_mode(False)
    def clues(self, bank: Bank, entries: OrderedEntries, end: int) -> Tensor | None:
        if self.asked is None:
            return None
        query = bank.of(self.asked)
        groups, count = query.shape[1:3]
        asking = torch.arange(end - count, end, device=query.device).repeat(groups)
        slots = entries.slots[:, None]
        seen = (slots <= asking[:, None]) & (slots >= 0)
        bias = torch.where(seen, entries.counts[:, None].log(), torch.finfo(torch.float32).min)
        real = torch.ones(len(query), len(asking), 1, device=query.device)
        if (visible := self.ledger.visible_by(self.heads)) is not None:
            real *= bank.of(visible)[:, 0, 0, asking][..., None]
        query, keys, values = (part.float().clone() for part in (query.flatten(1, 2), entries.keys, entries.values))
        queries = Queries(query, keys, values, bias, real, self.scaling, BLOCK)
        weights = 4 * GRADIENTS * len(query) * min(BLOCK, len(asking)) * slots.shape[2]
        self.meter.hold(weights)
        with self.meter.holding(query, keys, values, bias, real):
            clues = self.how.clues(queries)
        self.meter.hold(-weights)
        return clues

    # -- the cache contract -------------------------------------------------------------------------

    def forget_queries(self, length: int, resident: WorkingSet) -> None:
        if self.asked is not None:
            kept = self.asked.shape[2] - (self.length - length)
            self.asked = self.asked[:, :, :kept].clone() if kept > 0 else None
        super().forget_queries(length, resident)

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"scaling": torch.tensor([self.scaling], dtype=torch.float64)}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.scaling = float(state["scaling"][0])

    def check(self, extent: Extent) -> None:
        super().check(extent)
        if self.asked is not None:
            fits("asked", self.asked, (extent.lanes, self.queried, None, extent.key_dim))
            within("asked", self.asked.shape[2], 1, min(QUERIES, extent.slots) + 1)


@dataclass(frozen=True)
class NeighboursByQueries(Neighbours):
    """A fate that merges the least attended neighbours by the attention of the last queries. Each subclass has its
    file: a frozen dataclass with :meth:`clues` and :meth:`share`."""

    stores: ClassVar[type[MergeNeighbours]] = MergeByQueries

    @abstractmethod
    def clues(self, queries: Queries) -> Tensor:
        """Return the statistics of each entry, (lanes, entries, any); those of a merged entry are the sum of both."""

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the temporary bytes of the evicted entries, of the entries that they merge into, and of the weights of
        the last queries."""
        holding, evicted = super().holds(layer, geometry, entries, left), max(left, default=0)
        if not evicted:
            return holding
        both, queries = entries + evicted, max(evicted, QUERIES) * geometry.attention_heads
        more = 4 * queries * (layer.key_dim + both + 1) + 4 * both * layer.entry_elements
        more += 4 * GRADIENTS * layer.kv_heads * min(BLOCK, queries) * both
        return replace(holding, workspace=holding.workspace + more)
