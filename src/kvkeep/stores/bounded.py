"""The layer with a hard budget: the newest entries resident, the others recalled exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.stores.checkpoints import Checkpoint, Piece
from kvkeep.stores.places import Place
from kvkeep.stores.rows import Ring


class BoundedLayer(CacheLayerMixin):
    """Oldest leaves: slots ``evicted``..``length`` are resident in rings of ``capacity`` entries, those before are
    the checkpoint's. New entries stay in hand until attention has run, then :meth:`settle` writes them."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    streams = True

    def __init__(self, index: int, capacity: int, home: Place, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.index = index
        self.checkpoint = checkpoint
        self._keys, self._values = Ring(capacity, home), Ring(capacity, home)
        self.pending: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note that entries have come."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new entries in hand and return them; attention adds the past itself."""
        self.is_initialized = True
        self.pending = (key_states.detach(), value_states.detach())
        return key_states, value_states

    @property
    def length(self) -> int:
        """Slots settled so far."""
        return self._keys.length

    @property
    def evicted(self) -> int:
        """Slots that are no longer resident."""
        return self._keys.first

    @property
    def pending_bytes(self) -> int:
        """Bytes of the entries in hand."""
        return 0 if self.pending is None else sum(tensor.nbytes for tensor in self.pending)

    def past(self, ordered: bool) -> Iterator[Piece]:
        """Yield all settled entries: what was evicted, recalled piece by piece, then what is resident.

        Without ``ordered``, a full ring comes as one piece in the order it lies (no mask will ask which is which).
        """
        if self.evicted:
            yield from self.checkpoint.recall(self.index, self.evicted)
        keys, values = self._keys.everything(), self._values.everything()
        if not ordered and keys is not None and values is not None:
            yield self.evicted, keys, values
            return
        span = (self.evicted, self.length)
        for (start, key), (_, value) in zip(self._keys.read(*span), self._values.read(*span), strict=True):
            yield start, key, value

    def settle(self) -> None:
        """Make the entries in hand resident; the oldest beyond the capacity leave for the checkpoint first."""
        if self.pending is None:
            return
        (keys, values), self.pending = self.pending, None
        stop = self.length + keys.shape[-2]
        first = max(self.evicted, stop - self._keys.capacity)
        span = (self.evicted, min(first, self.length))
        for (_, key), (_, value) in zip(self._keys.read(*span), self._values.read(*span), strict=True):
            self.checkpoint.evict(self.index, key, value)
        if (skipped := first - self.length) > 0:  # a chunk longer than the capacity
            self.checkpoint.evict(self.index, keys[..., :skipped, :], values[..., :skipped, :])
        self._keys.append(keys)
        self._values.append(values)

    def get_seq_length(self) -> int:
        """Return the number of settled slots."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: nothing bounds the sequence."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are asked for over the new entries only; the past's visibility is the ledger's."""
        return query_length, self.length

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on, those in hand included."""
        self.pending = None
        self._keys.truncate(length)
        self._values.truncate(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` slots."""
        self.truncate(self.length - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget everything and free the memory."""
        self.__init__(self.index, self._keys.capacity, self._keys.home, self.checkpoint)  # type: ignore[misc]

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        self._keys.select(index)
        self._values.select(index)

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated for resident entries."""
        return self._keys.nbytes + self._values.nbytes

    def state(self) -> dict[str, Tensor]:
        """Return the resident entries in order."""
        pieces = [] if self.length == self.evicted else [piece for piece in self._resident()]
        return dict(pieces)

    def _resident(self) -> Iterator[tuple[str, Tensor]]:
        from kvkeep.stores.rows import concatenated

        yield "keys", concatenated(self._keys, self.evicted, self.length)
        yield "values", concatenated(self._values, self.evicted, self.length)

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as the last slots before ``length``."""
        count = state["keys"].shape[-2] if state else 0
        for rows, name in ((self._keys, "keys"), (self._values, "values")):
            rows.first = rows.length = length - count
            if count:
                rows.append(state[name])
        self.is_initialized = length > 0
