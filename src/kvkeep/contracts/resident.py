"""The entries of one layer that attention reads as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import EvictedEntries, Piece
from kvkeep.contracts.part import Part
from kvkeep.contracts.selector import Selector
from kvkeep.step.plan import LayerStep, Segment, Span


class Resident(Part):
    """The entries of one layer that attention reads as they are."""

    def arrive(self, keys: Tensor, values: Tensor) -> None:
        """Make room for new entries (lanes, n, dim), which :meth:`admit` will bring."""

    @abstractmethod
    def pieces(self, ordered: bool = True) -> Iterator[Piece]:
        """Yield what is held; without ``ordered`` entries may come in any order: the caller masks none of them."""

    @abstractmethod
    def admit(self, keys: Tensor, values: Tensor, first: int) -> EvictedEntries | None:
        """Keep new entries, whose slots begin at ``first``, within the budget. Return what was evicted, None for
        nothing, or where the store took it already."""

    def plan(self) -> LayerStep | None:
        """Return where the next entry of each lane goes, what it evicts, and what its query attends to, of one row
        without padding. None where that is not known before: the entry then comes by :meth:`admit`."""
        return None

    def commit(self) -> None:
        """Note that the step of :meth:`plan` has run."""

    def spans(self) -> Sequence[Span] | None:
        """Return all that is held where it lies; None where a later query does not see all of it."""
        return None

    @property
    def group(self) -> Hashable | None:
        """With which layers' entries those here are ranked and scored at once for a :meth:`plan`: with those that give
        the same; None: nothing is ranked or scored."""
        return None

    @property
    def observes(self) -> bool:
        """Whether entries are scored by the attention they receive."""
        return False

    def learn(self, weights: Tensor) -> None:
        """Score the entries, all of them settled and in one piece, by one query's ``weights`` (lanes, n)."""

    def observe(
        self,
        step: AttentionInputs,
        lse: Tensor,
        segments: Sequence[Segment],
        new: tuple[Tensor, Tensor] | None,
        first: int,
    ) -> None:
        """Score every entry by the attention it received. lse: as attention over everything returned it. segments:
        those of :meth:`pieces`. new: the step's new entries (lanes, n, dim) from slot ``first`` on, None once they are
        settled."""

    @abstractmethod
    def resident_slots(self, unmerged: bool = False) -> Tensor:
        """Return which slots are resident, (lanes, slots) bool, or (1, slots) where lanes are alike; ``unmerged``: and
        stand for no other."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on; entries that were evicted before do not come back by it."""

    @abstractmethod
    def select(self, lanes: Tensor) -> None:
        """Make the lanes those of an index (repeats and reorders allowed)."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as entries of ``length`` slots."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated for entries."""


class WorkingSet(Resident):
    """Resident entries that a selector chose, as stores may ask of them."""

    selector: Selector
    banks: Any
    length: int  # slots so far

    @property
    @abstractmethod
    def columns(self) -> int:
        """The most entries that a lane has room for."""

    @abstractmethod
    def observed(self, slots: Tensor, scores: Tensor, weights: Tensor, queries: int) -> Tensor:
        """Return what the selector makes of the attention that entries elsewhere received; (lanes, n) throughout. One
        that looks at keys and values is not shown those of entries elsewhere, and leaves their scores."""

    @abstractmethod
    def ranks(self, slots: Tensor, scores: Tensor) -> Tensor:
        """Return the ranks of entries elsewhere, (lanes, n) float32; -inf where a slot is -1."""

    @abstractmethod
    def lowest(self, count: int) -> Tensor:
        """Return the ranks of those entries of every lane that would be evicted first, (lanes, ``count``) float32,
        ascending: -inf for an empty column, inf where a lane has no more."""

    @abstractmethod
    def swap_in(self, slots: Tensor, keys: Tensor, values: Tensor, scores: Tensor | None = None) -> None:
        """Make entries resident: ``slots`` (lanes, n), none of which is, -1 for none; keys and values (lanes, n, dim);
        scores (lanes, n), by default those of new entries. In each lane they take empty columns, then those of the
        entries that rank lowest, which are evicted; there can be no more of them than the lane has columns."""
