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
from kvkeep.step.plan import LayerStep, Span


class EvictedStore(Part):
    """What became of the evicted entries of one layer. All it needs to know of the layer is what it is handed."""

    keeps: ClassVar[bool] = True
    """It takes evicted entries; otherwise they are not even gathered."""
    listens: ClassVar[bool] = False
    """It learns the attention that its pieces received, and entries come with their scores."""
    watches: ClassVar[bool] = False
    """Resident entries are scored by the attention of the last step where the selector scores them by none."""
    merges: ClassVar[bool] = False
    """Evicted entries are put into resident ones, which then stand for several tokens."""
    makes_room: ClassVar[bool] = False
    """No entry is evicted; :meth:`make_room` merges entries until new ones fit."""
    taken: int | None = None
    """Entries taken so far, where they come in the order of the text."""

    @property
    def compressed_bytes(self) -> int:
        """Bytes allocated for entries."""
        return 0

    def take(self, left: EvictedEntries, resident: WorkingSet) -> None:
        """Take evicted entries; ``resident``: those that stay."""

    def plan(self, step: LayerStep, evicts: bool) -> Sequence[Span] | None:
        """Say in ``step`` where the entry of each lane goes that the new one ``evicts``, if it does: there, where
        :meth:`take` puts it. Return what is here then; None where more than that is to be done."""
        more = self.keeps or self.listens or self.watches or self.merges or self.makes_room
        return None if more else ()

    def commit(self, slot: int | None) -> None:
        """Note that a step of :meth:`plan` that evicts has run. slot: of the evicted entry, in all lanes; None: those
        that the step wrote beside it."""

    def spans(self) -> Sequence[Span] | None:
        """Return what :meth:`pieces` would yield where it lies, codes in groups first; every later query sees all
        of it; the same objects as long as they are the same tensors. None where it cannot be read so."""
        return None if self.keeps else ()

    def pieces(self, query: Tensor, resident: Resident, length: int) -> Iterator[Piece]:
        """Yield what comes back for ``query`` (lanes, heads, queries, dim), of ``length`` slots so far."""
        return iter(())

    def observe(self, weights: Sequence[Tensor], queries: int, resident: WorkingSet) -> None:
        """Learn what each piece that :meth:`pieces` just yielded received of a step: (lanes, n) float32 for each, of
        ``queries`` queries, as the selector learns of those that are resident; where it asks for nothing, of all.
        Called for each reader of the layer, only where it :attr:`listens`."""

    def swap(self, resident: WorkingSet, length: int) -> None:
        """Bring entries back if that helps. Called after a step, only for stores that :attr:`listens`."""

    def forget(self, slots: Tensor) -> None:
        """Forget entries that are resident again from elsewhere: ``slots`` (lanes, n), -1 for none."""

    def begin(self, resident: WorkingSet) -> None:
        """Prepare for a step that attends before its entries are settled."""

    def attended(self, step: AttentionInputs, output: Tensor, resident: WorkingSet) -> None:
        """Learn a step's ``output`` (lanes, heads, queries, value_dim); entries attended first are not settled yet."""

    def make_room(self, bank: Any, new: Any, resident: WorkingSet) -> None:
        """Keep new entries of a bank, merging until there is room; only where it :attr:`makes_room`."""

    def settled(self, observed: bool, resident: WorkingSet) -> None:
        """Called when new entries have been kept; ``observed``: with the attention that they received."""

    def merged(self) -> tuple[int, int]:
        """Return how many pairs of entries were merged, and for how many of them a weight had to be clamped."""
        return 0, 0

    def states(self, lanes: int, length: int) -> Tensor:
        """Return what became of the entry of each slot, if it was evicted: (lanes, ``length``) int8 codes of
        :class:`EntryState`, on the CPU."""
        return torch.full((lanes, length), EntryState.DROPPED, dtype=torch.int8)

    def truncate(self, length: int, resident: WorkingSet) -> None:
        """Forget the slots from ``length`` on; ``resident`` did already, and the ledger still knows them."""

    def select(self, lanes: Tensor) -> None:
        """Make the lanes those of an index."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take what :meth:`state` gave."""
