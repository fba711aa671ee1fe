"""What a layer of chosen entries is made of, and what it asks of those who choose and of those who take the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.places import Place

if TYPE_CHECKING:
    from kvkeep.stores.selected import SelectedLayer


@dataclass(frozen=True)
class Candidates:
    """The entries a selector ranks. Tensors are (lanes, entries); the newest come last, the others in any order.

    slots: int64, -1 where a column is empty (its rank is not asked for). marks: what the selector noted of each,
    float32; None until it has noted something. first: (lanes, 1), the first real slot of each lane's row, 0 where there
    is no padding. length: slots of the sequence, the new ones included. new: how many of the entries are new. budget:
    how many will stay. heads: lanes of one row. layer: which. keys, values: (lanes, entries, dim) as cached, only for
    selectors that read them.
    """

    slots: Tensor
    marks: Tensor | None
    first: Tensor | int
    length: int
    new: int
    budget: int
    heads: int
    layer: int
    keys: Tensor | None = None
    values: Tensor | None = None


class Selector(Protocol):
    """What a layer asks of its selector; :mod:`kvkeep.policies.selectors` has them."""

    @property
    def watches(self) -> int | None:
        """How many of the last queries' attention it needs to be told: 0 none, None all."""

    @property
    def most(self) -> bool:
        """Whether it is told the most that any query and head gave, not the sum over queries, mean over heads."""

    @property
    def enters(self) -> bool:
        """Whether new entries get a mark of their own from :meth:`enter`; else it is 0."""

    @property
    def reads(self) -> bool:
        """Whether :meth:`rank` and :meth:`observe` need the keys and values themselves."""

    @property
    def ties(self) -> bool:
        """Whether several entries may well rank the same."""

    def enter(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return the first marks of new entries, (lanes, entries); keys (lanes, entries, dim)."""

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return marks after attention: ``weights`` (lanes, entries), of ``queries`` queries."""

    def rank(self, entries: Candidates) -> Tensor:
        """Return (lanes, entries): the lowest leaves first."""


class Fate(Protocol):
    """What becomes of entries that leave; :mod:`kvkeep.policies.fates` has them."""

    @property
    def forgets(self) -> bool:
        """Whether what leaves is not wanted at all."""

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        """Take entries that leave: (batch, kv_heads, n, dim), their slots (batch, kv_heads, n), -1 for none, and for a
        fate that hears the marks they had, (batch, kv_heads, n) float32."""

    def whereabouts(self, layer: SelectedLayer, length: int) -> Tensor:
        """Return what became of the entries of each slot, had they left: (batch, kv_heads, ``length``) codes of
        :class:`~kvkeep.stores.whereabouts.Whereabouts`, on the CPU."""

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Any, Any]]:
        """Yield what comes back for ``query`` (lanes, heads, queries, dim), piece by piece: slots (lanes, n), whether
        some are -1 for none, keys and values: (lanes, 1, n, dim) written out, or coded."""


@runtime_checkable
class Listener(Fate, Protocol):
    """A fate that hears what attention its entries received, and may bring some of them back
    (:func:`kvkeep.stores.exchange.bring`). What it yields in :meth:`recall` is held until it was heard."""

    def hear(self, layer: SelectedLayer, weights: Sequence[Tensor], queries: int) -> None:
        """Learn what each piece that :meth:`recall` just yielded received of a step: (lanes, n) float32 for each,
        of ``queries`` queries, as the selector is told of those that are resident; where it asks for nothing, of all.
        Called for each reader of the layer."""

    def exchange(self, layer: SelectedLayer) -> None:
        """Called when a step has settled, after the layer's last reader."""


@dataclass(frozen=True)
class Parts:
    """What a layer is made of: who chooses what stays in it, how much that is, and what becomes of the rest.

    index: of the layer in the model. budgets: entries of each KV head; one number: of each of them. home: where entries
    lie that stay.
    """

    index: int
    budgets: Sequence[int]
    selector: Selector
    fate: Fate
    home: Place
    ledger: Ledger
    meter: Meter
