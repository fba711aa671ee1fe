"""The entries of one layer that attention reads as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import Beginning, EvictedEntries, Piece
from kvkeep.contracts.part import Part
from kvkeep.contracts.selector import Selector
from kvkeep.step.plan import LayerStep, Segment, Span


class Resident(Part):
    """The entries of one layer that attention reads as they are."""

    def arrive(self, keys: Tensor, values: Tensor) -> None:
        """Make room for new entries (lanes, n, dim); a call of :meth:`admit` follows."""

    @abstractmethod
    def pieces(self, ordered: bool = True) -> Iterator[Piece]:
        """Yield the entries. Without ``ordered`` they may come in any order: the caller masks none of them."""

    def adopt(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
        """Take the entries of a text into this empty part: pieces (lanes, n, dim) in order, which never change. Return
        False, without taking any, where they have to be admitted one piece after the other."""
        return False

    lends = False
    """Whether another layer can begin with the first entries (:meth:`beginning`)."""

    def beginning(self, length: int) -> Beginning:
        """Return the first ``length`` entries, (lanes, n, dim). Whole blocks never change from now on, so that another
        layer may hold them, too. Only where this part :attr:`lends`."""
        raise TypeError(f"'{type(self).__name__}' lends no entries.")

    @abstractmethod
    def admit(self, keys: Tensor, values: Tensor, first: int) -> EvictedEntries | None:
        """Keep new entries, whose slots begin at ``first``, within the budget. Return the evicted entries; None where
        there are none, or where the store has them already."""

    def plan(self, count: int = 1) -> LayerStep | None:
        """Return where the next ``count`` entries of each lane are written, which entries they evict, and what their
        queries attend to, for one row without padding. None where this cannot be planned: the caller then uses
        :meth:`admit`."""
        return None

    def commit(self) -> None:
        """Note that the next token of the step of :meth:`plan` has run."""

    def layout(self) -> Sequence[Any] | None:
        """Return the tensors of the entries and all numbers that decide what a step of one token does, but for the
        length of the text. While they are the same, every step runs the same operators, in place, and :meth:`commit`
        is all that remains for the host. None where that is not so."""
        return None

    def spans(self) -> Sequence[Span] | None:
        """Return views of all entries; None where a later query does not see all of them."""
        return None

    @property
    def group(self) -> Hashable | None:
        """The key of a group of layers: a :meth:`plan` ranks and scores the entries of a group at once. None: nothing
        is ranked or scored."""
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
        """Score every entry by the attention it received. lse: the log-sum-exp of attention over all entries. segments:
        the resident entries, from :meth:`pieces`. new: the step's new entries (lanes, n, dim) from slot ``first`` on;
        None after they are settled."""

    @abstractmethod
    def resident_slots(self, unmerged: bool = False) -> Tensor:
        """Return which slots are resident, (lanes, slots) bool, or (1, slots) where all lanes agree. unmerged: only
        entries that stand for a single token."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on. Evicted entries stay evicted."""

    @abstractmethod
    def select(self, lanes: Tensor) -> None:
        """Replace the lanes by those of an index (repeats and reorders allowed)."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Restore the result of :meth:`state`, for ``length`` slots."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated for entries."""


class WorkingSet(Resident):
    """Resident entries that a selector chose, with methods for stores."""

    selector: Selector
    banks: Any
    length: int  # slots of the text

    def layout(self) -> Sequence[Any] | None:
        """Return the tensors of the banks, and how many of their columns are used or empty."""
        return [one for bank in self.banks for one in (*bank.tensors(), bank.used, bank.gaps)]

    @abstractmethod
    def observed(self, slots: Tensor, scores: Tensor, weights: Tensor, queries: int) -> Tensor:
        """Return the selector's scores of stored entries, from the attention that they received; (lanes, n) throughout.
        A selector that reads keys and values gets none of stored entries, and returns their scores unchanged."""

    @abstractmethod
    def ranks(self, slots: Tensor, scores: Tensor) -> Tensor:
        """Return the ranks of stored entries, (lanes, n) float32; -inf where a slot is -1."""

    @abstractmethod
    def lowest(self, count: int) -> Tensor:
        """Return the ``count`` lowest ranks of every lane, (lanes, ``count``) float32, ascending: -inf for an empty
        column, inf where a lane has fewer entries."""

    @abstractmethod
    def swap_in(self, slots: Tensor, keys: Tensor, values: Tensor, scores: Tensor | None = None) -> None:
        """Make entries resident: ``slots`` (lanes, n), -1 for none; keys and values (lanes, n, dim); scores (lanes, n),
        by default those of new entries. No slot may be resident already. In each lane the entries take empty columns
        first. Then they replace the entries with the lowest ranks, which are evicted. n is at most the columns of a
        lane."""
