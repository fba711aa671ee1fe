"""``kvslimmer``: a pair's key from the Hessian of attention, without a gradient (arXiv:2603.00907, Eq. 33).

With a the attention of one query, o its output and r_i = v_i - o, the blocks of keys m and m + 1 are (E . c_ij) q q^T /
d_k (Eq. 26), E = dL/do, where

    c_11 = a_m (1 - 2 a_m) r_m,   c_22 = a_m+1 (1 - 2 a_m+1) r_m+1,   c_12 = -a_m a_m+1 (r_m + r_m+1)     (Eqs. 23-25)

The factors before the residuals are shared by Eqs. 30 and 33.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from kvkeep.budget import MIN_CHUNK
from kvkeep.contracts.fate import Fate
from kvkeep.contracts.part import PredictedBytes, Site
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.models.binding import bind
from kvkeep.stores.evicted.neighbours import MergeNeighbours, MergesNeighbours
from kvkeep.stores.evicted.pairs import PairMerging, Pairs


@dataclass(frozen=True)
class MergesPairs(Fate):
    """The parameters that all these fates share."""

    sinks: int = 32
    """First entries of a row that are never merged."""
    cap: int = 5
    """The largest count of a merged entry; 0: no limit."""
    slack: float = 0.125
    """Pairs merged at a time while decoding: a share of the budget, or (from 1 on) a number."""

    label: ClassVar[str] = "merged"
    leaves: ClassVar[str] = "the least attended neighbours"
    stores: ClassVar[type[EvictedStore]] = MergesNeighbours

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UsageError(f"The number of sinks is 0 or more, not {self.sinks}.")
        if self.cap != 0 and self.cap < 2:
            raise UsageError(f"The cap of a merged entry is 2 or more, or 0 for no limit, not {self.cap}.")
        if not self.slack > 0:
            raise UsageError(f"The slack is a share of the budget or a number of pairs, not {self.slack:g}.")

    def chunk(self, name: str, entries: int, chunk: int, chosen: bool) -> int:
        """Return the tokens of a prompt to read at a time: by default a quarter of the budget, as in the papers (512 of
        2,048). A chunk as long as the budget would merge nearly everything each time."""
        return chunk if chosen else min(chunk, max(MIN_CHUNK, entries // 4))

    def fits(self, name: str, geometry: ModelGeometry, entries: int) -> None:
        super().fits(name, geometry, entries)
        self.check_room(name, entries)

    def check(self, model: Any, geometry: ModelGeometry) -> None:
        full = [layer.index for layer in geometry.full_layers]
        bind(model).require("turn", full, "merging, which turns keys to new positions", "use h2o+merge")

    @abstractmethod
    def check_room(self, name: str, entries: int) -> None:
        """Raise BudgetError where ``entries`` leave nothing to merge."""

    def beside(self, pinned: int) -> Self:
        """Return the fate that leaves the first ``pinned`` entries as they are, too."""
        return replace(self, sinks=max(self.sinks, pinned))

    def pairs_at_once(self, budget: int) -> int:
        """Return the number of pairs merged at a time while decoding with a ``budget`` of entries: at most a quarter of
        the entries that may merge."""
        wanted = int(self.slack) if self.slack >= 1 else int(self.slack * budget)
        return max(1, min(wanted, (budget - self.sinks) // 4))


@dataclass(frozen=True)
class Neighbours(MergesPairs, PairMerging):
    """Merges the least attended neighbours, by the queries so far. A subclass is a frozen dataclass that defines
    :meth:`share`."""

    stores: ClassVar[type[MergeNeighbours]] = MergeNeighbours

    def refuses(self, method: Any) -> str | None:
        reason = (
            "Merging chooses neighbours by accumulated attention; use h2o or h2o-fisher with halflife=0, which keep it."
        )
        return None if method.selector.accumulates else reason

    def check_room(self, name: str, entries: int) -> None:
        if entries < self.sinks + 4:
            raise BudgetError(
                f"A budget of {entries} entries leaves '{name}' too few to merge beside {self.sinks} sinks; give "
                f"at least {self.sinks + 4}, or fewer sinks ({name.partition('+')[0].partition(':')[0]}:sinks=4)."
            )

    def store(self, site: Site, shared: Any) -> EvictedStore:
        budget, how = min(site.budgets), self.beside(site.pinned)
        how.check_room(f"layer {site.layer.index}", budget)
        return self.stores(site, how, bind(site.model), how.pairs_at_once(budget))

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, entries: int, left: Sequence[int]) -> PredictedBytes:
        """Return the bytes of temporary tensors: the pairs before and after they are merged."""
        longest = max(left, default=0)
        merged = entries + longest if longest else 0
        return PredictedBytes(workspace=4 * merged * layer.entry_elements * geometry.dtype_bytes)


@dataclass(frozen=True)
class KVSlimmer(Neighbours):
    """Merges the least attended neighbours into one entry, whose key follows from attention, values and output."""

    source: ClassVar[str] = "arXiv:2603.00907, Eq. 33"

    def share(self, pairs: Pairs) -> Tensor:
        """Return (|c11| - |c12|) / (|c11| - 2 |c12| + |c22|)."""
        first, second, mixed = (c.norm(dim=-1, keepdim=True) for c in curvatures(pairs))
        return best_share(first, -mixed, second)


def curvatures(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return c11, c22 and c12 (Eqs. 23-25), (lanes, pairs, value_dim): the second derivatives of the output by the
    scores of both. The paper has one query; here attention and output are means over queries and heads."""
    assert pairs.output is not None
    (first, second), (one, two) = (weight[..., None] for weight in pairs.attention), pairs.values
    one, two = one - pairs.output, two - pairs.output
    return diagonal(first) * one, diagonal(second) * two, mixed(first, second) * (one + two)


def diagonal(attention: Tensor) -> Tensor:
    """Return the factor of c_11 and c_22: a (1 - 2 a)."""
    return attention * (1 - 2 * attention)


def mixed(first: Tensor, second: Tensor) -> Tensor:
    """Return the factor of c_12: -a_m a_m+1."""
    return -first * second


def best_share(first: Tensor, mixed: Tensor, second: Tensor) -> Tensor:
    """Return the first key's share of the merged one from g_11, g_12 and g_22, g_ij = E . c_ij (Eq. 30); the closed
    form has |c_11|, -|c_12| and |c_22| in their place (Eq. 33)."""
    return (first + mixed) / (first + 2 * mixed + second)
