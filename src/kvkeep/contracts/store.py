"""The store of the evicted entries of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.contracts.part import Part
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.step.plan import Destination, Span, StoreShare

_NOTHING = StoreShare()


class EvictedStore(Part):
    """The evicted entries of one layer. The arguments of its methods have what the layer knows at that moment."""

    keeps: ClassVar[bool] = True
    """The store takes evicted entries; otherwise the layer does not gather them."""
    listens: bool = False
    """The store learns the attention that its pieces received, and evicted entries come with their scores."""
    watches: ClassVar[bool] = False
    """Where the selector does not score by attention, the attention of the last step scores resident entries."""
    merges: ClassVar[bool] = False
    """Evicted entries are merged into resident ones, which then stand for several tokens."""
    makes_room: ClassVar[bool] = False
    """The store merges resident entries until new ones fit (:meth:`make_room`), instead of taking evicted ones."""

    @property
    def idle(self) -> bool:
        """Whether the store has no part in a step."""
        return not (self.keeps or self.listens or self.watches or self.merges or self.makes_room)

    @property
    def compressed_bytes(self) -> int:
        """Bytes allocated for entries."""
        return 0

    @property
    def max_entries(self) -> int | None:
        """The number of entries of a lane that full groups hold; beyond it, new ones replace the oldest. None: no such
        limit, or the store ranks its entries by itself."""
        return None

    @property
    def plans_each_lane(self) -> bool:
        """Whether :meth:`plan` is for one lane at a time, because lanes have different numbers of places."""
        return False

    def divide(self, places: Sequence[int]) -> list[tuple[Tensor | None, EvictedStore]]:
        """Give each lane of this empty store its own number of ``places``, where the store can. Return the stores, with
        the indices of their lanes (None: all)."""
        return [(None, self)]

    def places(self, lanes: int) -> int:
        """Return how many entries the full groups of ``lanes`` lanes hold together: :attr:`max_entries` each, or what
        :meth:`divide` gave them; 0 where there is no such limit."""
        return lanes * (self.max_entries or 0)

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        """Take evicted entries. resident: the entries that stay."""

    def plan(self, append: Destination, first_lane: int, evicts: int) -> StoreShare | None:
        """Return what a step reads of this store; None where the store cannot plan it. evicts: how many entries of each
        lane it evicts. The step copies them to the places where :meth:`take` would put them. append: where the new
        entries of the lanes from ``first_lane`` on are written."""
        return _NOTHING if self.idle else None

    def commit(self) -> None:
        """Note that a step of :meth:`plan` that evicts has run. It wrote the slots beside the entries."""

    def spans(self) -> Sequence[Span] | None:
        """Return views of the entries of :meth:`pieces`, codes in groups first. Every later query sees all of them.
        None where attention needs a copy."""
        return None if self.keeps else ()

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        """Yield the entries that come back for ``query`` (lanes, heads, queries, dim). length: slots so far."""
        return iter(())

    def observe(self, weights: Sequence[Tensor], queries: int, resident: WorkingSet) -> None:
        """Learn the attention that each piece, as :meth:`pieces` just yielded it, received in a step: (lanes, n)
        float32 for each, of ``queries`` queries. These are the selector's observed queries, or all where it observes
        none. Called for each reader of the layer, only where the store :attr:`listens`."""

    def swap(self, resident: WorkingSet, length: int) -> None:
        """Make entries resident again if they rank high enough. Called after a step, only where the store
        :attr:`listens`."""

    def begin(self, resident: WorkingSet) -> None:
        """Called before the attention of a step whose new entries are settled afterwards."""

    def attended(self, step: AttentionInputs, output: Tensor, resident: WorkingSet) -> None:
        """Learn a step's ``output`` (lanes, heads, queries, value_dim), before its entries are settled."""

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        """Called after new entries are settled. observed: their attention was observed."""

    def make_room(self, bank: Any, new: Any, resident: WorkingSet) -> None:
        """Keep new entries of a bank, merging until they fit. Called only where the store :attr:`makes_room`."""
        raise NotImplementedError

    def states(self, lanes: int, length: int) -> Tensor:
        """Return the state of each slot's entry, as if the entry were evicted: (lanes, ``length``) int8 codes of
        :class:`EntryState`, on the CPU."""
        return torch.full((lanes, length), EntryState.DROPPED, dtype=torch.int8)

    def truncate(self, length: int, resident: WorkingSet) -> None:
        """Forget the slots from ``length`` on. ``resident`` has forgotten them already; the ledger still has them."""

    def select(self, lanes: Tensor) -> None:
        """Replace the lanes by those of an index."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`state`."""
