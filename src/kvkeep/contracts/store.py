"""The store of the evicted entries of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EntryState, EvictedEntries, Piece
from kvkeep.contracts.part import Part
from kvkeep.contracts.resident import Resident, WorkingSet
from kvkeep.memory.rows import Rows
from kvkeep.step.plan import LayerStep, Span


class SecondReading(NamedTuple):
    """A whole text of one layer, and queries of its reconstruction."""

    keys: Tensor
    """(lanes, slots, key_dim), as cached."""
    values: Tensor
    """(lanes, slots, value_dim), as cached."""
    real: Tensor | None
    """(lanes, slots) bool, False for padding; None: no padding."""
    queries: Tensor
    """(lanes, n, key_dim), of all heads that share the lane, rotated to positions after the text."""
    valid: Tensor
    """(lanes, n) bool, False for queries of padding."""
    scaling: float
    """The factor of products of queries with keys."""


class EvictedStore(Part):
    """The evicted entries of one layer. A store gets data of the layer only through the arguments of its methods."""

    keeps: ClassVar[bool] = True
    """The store takes evicted entries; otherwise the layer does not gather them."""
    listens: ClassVar[bool] = False
    """The store learns the attention that its pieces received, and evicted entries come with their scores."""
    watches: ClassVar[bool] = False
    """Where the selector does not score by attention, the attention of the last step scores resident entries."""
    merges: ClassVar[bool] = False
    """Evicted entries are merged into resident ones, which then stand for several tokens."""
    makes_room: ClassVar[bool] = False
    """:meth:`make_room` merges entries until new ones fit, instead of evicting any."""
    taken: int | None = None
    """Entries taken so far, where they are taken in the order of the text."""

    @property
    def compressed_bytes(self) -> int:
        """Bytes allocated for entries."""
        return 0

    @property
    def rows(self) -> tuple[Rows, Rows] | None:
        """Where keys and values are kept in the order of the text; None where they are not kept so."""
        return None

    def adopt(self, keys: Sequence[Tensor], values: Sequence[Tensor], least: int) -> int | None:
        """Take the first entries of a text into this empty store: at least ``least`` ones of the pieces (lanes, n, dim)
        in order, which never change, and more where that needs no copy. Return how many; None, without taking any,
        where entries have to be evicted one piece after the other."""
        return None

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        """Take evicted entries. resident: the entries that stay."""

    def plan(self, step: LayerStep, evicts: bool) -> Sequence[Span] | None:
        """If the new entry ``evicts`` one, write into ``step`` where the evicted entry of each lane is copied: to the
        place where :meth:`take` would put it. Return the spans after the step; None where the store cannot plan it."""
        more = self.keeps or self.listens or self.watches or self.merges or self.makes_room
        return None if more else ()

    def commit(self, slot: int | None) -> None:
        """Note that a step of :meth:`plan` that evicts has run. slot: the slot of the evicted entry in all lanes; None:
        the step wrote the slots beside the entry."""

    def spans(self) -> Sequence[Span] | None:
        """Return views of the entries of :meth:`pieces`, codes in groups first. Every later query sees all of them. As
        long as the tensors stay, each call returns the same objects. None where attention needs a copy."""
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
        """Prepare for a step that attends before its entries are settled."""

    def attended(self, step: AttentionInputs, output: Tensor, resident: WorkingSet) -> None:
        """Learn a step's ``output`` (lanes, heads, queries, value_dim), before its entries are settled."""

    def make_room(self, bank: Any, new: Any, resident: WorkingSet) -> None:
        """Keep new entries of a bank, merging until they fit; only where the store :attr:`makes_room`."""

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        """Called after new entries are settled. observed: their attention was observed."""

    def fit(self, text: SecondReading, resident: WorkingSet) -> None:
        """Change the resident entries of a text that a reconstruction has chosen, so that attention to them is like
        attention to the whole text. Called once, only where the fate keeps :attr:`Fate.reference_queries`."""

    def merged(self) -> tuple[int, int]:
        """Return the number of merged pairs of entries, and the number of those with a clamped weight."""
        return 0, 0

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
