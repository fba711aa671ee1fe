"""What layers whose past is streamed to attention have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class StreamedLayer(CacheLayerMixin):
    """A cache layer that hands attention only what is new, and its past in pieces.

    A step: :meth:`update` takes the new entries in hand, attention reads them and what was settled, :meth:`settle`
    keeps them. ``length``: slots settled so far.
    """

    is_croppable = True
    is_sliding = False
    supports_early_init = False
    length: int

    def __init__(self) -> None:
        super().__init__()
        self.pending: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def settle(self) -> None:
        """Keep the entries in hand."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on, those in hand included."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note that entries have come."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new entries in hand and return them; attention adds the past itself."""
        self.is_initialized = True
        self.pending = (key_states.detach(), value_states.detach())
        return key_states, value_states

    @property
    def pending_bytes(self) -> int:
        """Bytes of the entries in hand."""
        return 0 if self.pending is None else sum(tensor.nbytes for tensor in self.pending)

    def get_seq_length(self) -> int:
        """Return the number of settled slots."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: nothing bounds the sequence."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are asked for over the new entries only; the past's visibility is the ledger's."""
        return query_length, self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` slots."""
        self.truncate(self.length - abs(tokens_to_remove))


class OrderedLayer(StreamedLayer):
    """A streamed layer whose entries leave in order, in all heads alike. ``evicted``: how many slots, the first, are no
    longer resident."""

    evicted: int

    @abstractmethod
    def past(self, ordered: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield all settled entries as (first slot, keys, values), (batch, kv_heads, entries, dim) each.

        Without ``ordered`` the entries of a piece may come in any order: no mask will ask which is which.
        """
