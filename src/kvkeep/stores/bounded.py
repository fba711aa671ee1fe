"""The layer with a hard budget: the newest entries resident, the others recalled exactly."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvkeep.stores.checkpoints import Checkpoint, Piece
from kvkeep.stores.places import Place
from kvkeep.stores.rows import Ring, concatenated
from kvkeep.stores.streamed import OrderedLayer


class BoundedLayer(OrderedLayer):
    """Oldest leaves: slots ``evicted``..``length`` are resident in rings of ``capacity`` entries, those before are
    the checkpoint's. New entries stay in hand until attention has run, then :meth:`settle` writes them."""

    def __init__(self, index: int, capacity: int, home: Place, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.index = index
        self.checkpoint = checkpoint
        self._keys, self._values = Ring(capacity, home), Ring(capacity, home)

    @property
    def length(self) -> int:  # type: ignore[override]
        """Slots settled so far."""
        return self._keys.length

    @property
    def evicted(self) -> int:  # type: ignore[override]
        """Slots that are no longer resident."""
        return self._keys.first

    def past(self, ordered: bool) -> Iterator[Piece]:
        """Yield all settled entries: what was evicted, recalled piece by piece, then what is resident.

        Without ``ordered``, a full ring comes as one piece in the order it lies (no mask will ask which is which).
        """
        if self.evicted:
            yield from self.checkpoint.recall(self.index, self.evicted, unformed=True)
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

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on, those in hand included."""
        self.pending = None
        self._keys.truncate(length)
        self._values.truncate(length)

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
        if self.length == self.evicted:
            return {}
        span = (self.evicted, self.length)
        return {"keys": concatenated(self._keys, *span), "values": concatenated(self._values, *span)}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as the last slots before ``length``."""
        count = state["keys"].shape[-2] if state else 0
        for rows, name in ((self._keys, "keys"), (self._values, "values")):
            rows.first = rows.length = length - count
            if count:
                rows.append(state[name])
        self.is_initialized = length > 0
