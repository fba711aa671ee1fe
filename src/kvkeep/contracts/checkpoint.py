"""What entries are rebuilt from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from kvkeep.contracts.entries import Piece
from kvkeep.memory.rows import Rows
from kvkeep.step.plan import Destination, Span


class Checkpoint(ABC):
    """What entries are rebuilt from, for all layers of one cache: a residual may serve several layers."""

    spec: Any
    """The :class:`~kvkeep.stores.checkpoints.spec.CheckpointSpec` that was asked for."""
    where: str
    """The place it is in: "device", "host" or "disk"."""
    capacity: int | None
    """Entries it may hold; None: no limit."""
    by_token: bool
    """It is kept for every token, not only for evicted entries."""
    copies: bool
    """A recall is a copy at most, and computes nothing."""
    picks: bool
    """Single entries can be had without all those before them."""
    replays: bool
    """Layers are run again, by the model's own masks."""

    @property
    def reads_ids(self) -> bool:
        """Whether the ledger's ids are part of what entries are rebuilt from."""
        return False

    def begin_forward(self, from_ids: bool, known: int) -> None:
        """Prepare for new tokens, after the ``known`` slots before them; ``from_ids``: they came as ids."""

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Take the residual entering a layer, (batch, new, hidden)."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take entries (lanes, n, dim) of a layer, in order."""

    @abstractmethod
    def pieces(self, layer: int, stop: int, lazy: bool = False) -> Iterator[Piece]:
        """Yield exact keys and values of the first ``stop`` entries, in order. ``lazy``: all may come as
        one piece that is read where it lies."""

    def spans(self, layer: int, stop: int) -> Sequence[Span] | None:
        """Return the first ``stop`` entries where they lie; the one of :meth:`next_row` may be the last of them.
        None where attention cannot read them there."""
        return None

    def next_row(self, layer: int) -> Destination | None:
        """Return where the next entry of each of a layer's lanes goes; None where that is not known before."""
        return None

    def commit(self, layer: int) -> None:
        """Note that it was written there."""

    @abstractmethod
    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return exact keys and values (n, dim) of single entries: ``lane`` (n,) and ``slot`` (n,), none lost."""

    @abstractmethod
    def first(self, layer: int) -> int:
        """Return the first entry that is still there; those before are lost."""

    @abstractmethod
    def length(self, layer: int) -> int:
        """Return how many entries came, those that are lost included."""

    def truncate(self, layer: int, length: int) -> None:
        """Forget what belongs to a layer's entries from ``length`` on."""

    def truncate_residuals(self, length: int) -> None:
        """Forget what is kept for each token from slot ``length`` on."""

    @abstractmethod
    def select(self, index: Tensor, lanes: Any) -> None:
        """Make the batch the rows of ``index``; ``lanes``: a function from KV heads to the index of lanes."""

    @abstractmethod
    def stores(self) -> Iterator[tuple[str, Rows]]:
        """Yield every store of rows with a name, for counting, saving and moving."""

    def expect(self, names: set[str]) -> None:
        """Make room for the stores called ``names``, about to be filled from a file."""
