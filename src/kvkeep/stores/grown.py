"""The layer that keeps everything: a transformers cache layer over two growing buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.errors import UsageError
from kvkeep.stores.rows import BLOCK, Buffer


class GrownLayer(CacheLayerMixin):
    """Exact: all keys and values, (batch, kv_heads, length, dim), in buffers that grow by blocks (``full``) or were
    allocated whole for ``limit`` entries (``static``). Attention reads views: a step copies one entry."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, block: int = BLOCK, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self._keys, self._values = Buffer(block, limit), Buffer(block, limit)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note that entries have come; the buffers take shape from the first of them."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append and return views of all keys and values."""
        stop = self._keys.length + key_states.shape[-2]
        if self.limit is not None and stop > self.limit:
            raise UsageError(
                f"The static cache holds {self.limit} entries and {stop} are needed; give it a larger budget, or use "
                "method 'full', which grows."
            )
        self.is_initialized = True
        self._keys.append(key_states)
        self._values.append(value_states)
        self.keys, self.values = self._keys.view(), self._values.view()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of entries."""
        return self._keys.length

    def get_max_length(self) -> int:
        """Return the limit, or -1."""
        return -1 if self.limit is None else self.limit

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (entries after the update, 0)."""
        return self._keys.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` entries."""
        self.truncate(self._keys.length - abs(tokens_to_remove))

    def truncate(self, length: int) -> None:
        """Forget the entries from ``length`` on."""
        for rows in (self._keys, self._values):
            rows.truncate(max(0, length))
        if self.is_initialized:
            self.keys, self.values = self._keys.view(), self._values.view()

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        if self.is_initialized:
            self._keys.select(index)
            self._values.select(index)
            self.keys, self.values = self._keys.view(), self._values.view()

    @property
    def resident_bytes(self) -> int:
        """Bytes allocated for entries."""
        return self._keys.nbytes + self._values.nbytes

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        return {"keys": self.keys, "values": self.values} if self.is_initialized and self._keys.length else {}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave."""
        if state:
            self.update(state["keys"], state["values"])
