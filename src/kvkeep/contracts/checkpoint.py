"""Checkpoints: the data from which entries are rebuilt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from kvkeep.contracts.entries import Piece
from kvkeep.memory.places import Place
from kvkeep.memory.rows import Rows
from kvkeep.step.plan import Destination, Span


class Checkpoint(ABC):
    """The data from which entries are rebuilt, for all layers of one cache: layers may share residuals."""

    spec: Any
    """The requested :class:`~kvkeep.stores.checkpoints.spec.CheckpointSpec`."""
    home: Place
    """The place of its data."""
    capacity: int | None
    """The maximum number of entries; None: no limit."""
    by_token: bool
    """The checkpoint stores every token, evicted or not."""
    copies: bool
    """A recall computes nothing; at most it copies data."""
    in_place = False
    """Attention reads all entries where they are stored: no copy crosses a bus."""
    replays: bool
    """The checkpoint runs layers again, with the model's masks."""
    staged = 0
    """Entries of each layer's budget that copies on the device take."""
    block = 1
    """How many entries of a lane leave the device together, if they are evicted in order."""

    @property
    def reads_ids(self) -> bool:
        """Whether entries are rebuilt from the ledger's ids, among other data."""
        return False

    def begin_forward(self, from_ids: bool, known: int) -> None:
        """Prepare for new tokens after ``known`` slots. from_ids: the tokens come as ids."""

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Take the residual entering a layer, (batch, new, hidden)."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take entries (lanes, n, dim) of a layer, in order."""

    def adopt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take entries as :meth:`append`, which never change, without a copy where that is possible."""
        self.append(layer, keys, values)

    def holds(self, layer: int, keys: Tensor) -> bool:
        """Return whether :meth:`adopt` would take entries with these keys without a copy."""
        return False

    def rows(self, layer: int) -> tuple[Rows, Rows] | None:
        """Return where a layer's keys and values are kept, in the order of the text; None where they are rebuilt."""
        return None

    @abstractmethod
    def pieces(self, layer: int, stop: int, lazy: bool = False) -> Iterator[Piece]:
        """Yield exact keys and values of the first ``stop`` entries, in order. lazy: one piece may hold all entries,
        without a copy."""

    def spans(self, layer: int, stop: int) -> Sequence[Span] | None:
        """Return views of the first ``stop`` entries; the last entry may be in the row of :meth:`next_row`. None where
        attention needs a copy."""
        return None

    def next_row(self, layer: int) -> Destination | None:
        """Return where the next entry of each of a layer's lanes is written; None where the checkpoint needs the entry
        first (:meth:`append`)."""
        return None

    def commit(self, layer: int) -> None:
        """Note that the entry of :meth:`next_row` was written."""

    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return exact keys and values (n, dim) of single entries at ``lane`` (n,) and ``slot`` (n,). All of them must
        still be stored. Only where a recall :attr:`copies`."""
        raise NotImplementedError

    def first(self, layer: int) -> int:
        """Return the first entry that is still stored; earlier ones are lost."""
        return 0

    def beginning(self, layer: int) -> int:
        """Return the number of the text's first entries that are still stored although later ones are lost."""
        return 0

    @abstractmethod
    def length(self, layer: int) -> int:
        """Return the number of entries received, lost ones included."""

    def truncate(self, layer: int, length: int) -> None:
        """Forget a layer's entries from ``length`` on."""

    def truncate_residuals(self, length: int) -> None:
        """Forget the data of each token from slot ``length`` on."""

    @abstractmethod
    def select(self, index: Tensor, lanes: Any) -> None:
        """Replace the batch by the rows of ``index``. lanes: a function from KV heads to the index of lanes."""

    @abstractmethod
    def stores(self) -> Iterator[tuple[str, Rows]]:
        """Yield every store of rows with a name, for counting, saving and moving."""

    def allocated(self) -> dict[str, int]:
        """Return the bytes allocated, by place."""
        return {self.home.name: sum(rows.nbytes for _, rows in self.stores())}

    def expect(self, names: set[str]) -> None:
        """Create the stores called ``names``, which a file is about to fill."""
