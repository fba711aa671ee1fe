"""Layers that transformers or the CPU kernel attends to: those of ``full``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.contracts.entries import Beginning, EntryState
from kvkeep.memory.meter import nbytes
from kvkeep.memory.rows import BLOCK, Rows
from kvkeep.memory.shared_rows import SharedRows
from kvkeep.step.plan import Destination, FullPages, LayerStep, Span


def holding_of(layer: Any) -> Any:
    """Return the object that reports the contents of a cache layer: the layer itself, or a :class:`StockState` for a
    layer of transformers."""
    return layer if getattr(layer, "is_kvkeep", False) else StockState(layer)


class StockState:
    """The contents of a layer that transformers manages: another layer's entries, or a state of another kind."""

    compressed_bytes = bookkeeping_bytes = 0

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self.layer, name, None) for name in ("keys", "values")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def rows(self) -> int:
        return next((len(tensor) for tensor in self._tensors().values() if tensor.numel()), 0)

    @property
    def resident_bytes(self) -> int:
        return nbytes(*self._tensors().values())

    def select(self, index: Tensor) -> None:
        if self._tensors():
            self.layer.reorder_cache(index)

    def entry_states(self, length: int, batch: int) -> Tensor:
        """Return the state of every slot, (batch, 1, ``length``) int8 codes: all are resident."""
        return torch.full((batch, 1, length), EntryState.RESIDENT, dtype=torch.int8)

    def state(self) -> dict[str, Tensor]:
        return self._tensors()

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        if state:
            self.layer.update(state["keys"], state["values"])


class DynamicLayer(CacheLayerMixin):
    """An exact layer: all keys and values, (batch, kv_heads, length, dim), in buffers that grow by blocks.
    Attention reads views: a step copies one entry. In ``pieces``, nothing is copied to grow, and another layer can
    share blocks (:meth:`beginning`). The CPU kernel reads pieces in place; any other reader gets a copy."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    is_kvkeep = True
    lost = False
    lends = True
    """Whether another layer can begin with its first entries (:meth:`beginning`)."""
    compressed_bytes = bookkeeping_bytes = 0

    def __init__(self, pieces: bool = False) -> None:
        self.is_initialized = False  # transformers' constructor also sets keys and values
        self.in_pieces = pieces
        self._keys, self._values = (SharedRows(BLOCK, pieces) for _ in range(2))
        self._full = FullPages()

    @property
    def keys(self) -> Tensor | None:
        """All keys, (batch, kv_heads, length, dim); None before the first."""
        return self._keys.view() if self._keys.batch else None

    @property
    def values(self) -> Tensor | None:
        """All values, (batch, kv_heads, length, value_dim); None before the first."""
        return self._values.view() if self._values.batch else None

    def shareable(self, length: int) -> int:
        """Return how many of the first ``length`` entries another layer can hold, too."""
        return self._keys.shareable(length)

    def beginning(self, length: int) -> Beginning:
        """Return the first ``length`` entries, (batch, kv_heads, n, dim). Those that are :meth:`shareable` never change
        from now on, so that another layer may hold them, too."""
        both = self._keys, self._values
        return Beginning.of([rows.freeze(length) for rows in both], both, length)

    def pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Return all keys and values in order, where they lie: (batch, kv_heads, n, dim) each."""
        tail = self._keys.tail.view(), self._values.tail.view()
        return [*zip(self._keys.head, self._values.head, strict=True), tail]

    @property
    def shared(self) -> list[Tensor]:
        """The tensors that other layers may share."""
        return [*self._keys.head, *self._values.head]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note that the first entries arrived; the buffers take their shape from them."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.append(key_states, value_states)
        return self._keys.view(), self._values.view()

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take new entries, (batch, kv_heads, new, dim)."""
        self.is_initialized = True
        self._keys.append(key_states)
        self._values.append(value_states)

    def plan(self, count: int = 1) -> LayerStep | None:
        """Return the step for the next ``count`` entries of each head of one row. None where memory has to grow first,
        or where there are several rows."""
        row, keys, values = self._keys.tail.length, self._keys.tail.data, self._values.tail.data
        if keys is None or values is None:
            return None
        batch, _, rows, _ = keys.shape
        if batch > 1 or row + count > rows:
            return None
        last, full = Span(keys, values, 0, row + count), self._full.span(self._keys.head, self._values.head)
        spans = [last] if full is None else [full, last]
        return LayerStep(Destination(keys, values, row), self._keys.length, attend=spans, tokens=count)

    def follows(self, step: LayerStep) -> int | None:
        """Return how many tokens after ``step``, which was planned earlier, the same step comes next; None where other
        memory is written or read meanwhile."""
        keys, values, append = self._keys.tail, self._values.tail, step.append
        *full, _ = step.attend
        pages = len(full[0].keys.spans) if full else 0
        if keys.data is not append.keys or values.data is not append.values or len(self._keys.head) != pages:
            return None
        row = keys.length
        return row - append.row if row + step.tokens <= append.keys.shape[2] else None

    def commit(self) -> None:
        """Note that the step of :meth:`plan` has run."""
        self._keys.advance()
        self._values.advance()

    def get_seq_length(self) -> int:
        return self._keys.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._keys.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        self.truncate(self._keys.length - abs(tokens_to_remove))

    def truncate(self, length: int) -> None:
        for rows in (self._keys, self._values):
            rows.truncate(max(0, length))

    def select(self, index: Tensor) -> None:
        for rows in (self._keys, self._values):
            rows.select(index)

    @property
    def rows(self) -> int:
        return self._keys.batch

    @property
    def resident_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def entry_states(self, length: int, batch: int) -> Tensor:
        heads = next((rows.shape[1] for _, rows in self._keys.read(0, 1)), 1)
        return torch.full((batch, heads, length), EntryState.RESIDENT, dtype=torch.int8)

    def state(self) -> dict[str, Rows]:
        return {"keys": self._keys, "values": self._values} if self._keys.length else {}

    def adopt(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Take entries into this empty layer: pieces of keys and of values, in order. In pieces, the layer uses whole
        blocks without a copy."""
        for rows, pieces in ((self._keys, keys), (self._values, values)):
            for piece in pieces if self.in_pieces else [torch.cat([*pieces], -2)]:
                rows.adopt(piece)
        self.is_initialized = True
