"""What layers whose past is streamed to attention have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.attention import Segment, attend
from kvkeep.attention.visibility import new_mask, past_mask
from kvkeep.stores.checkpoints import expanded


@dataclass(frozen=True)
class Step:
    """What one layer is asked in one forward pass.

    module: the layer's attention module. query (batch, heads, queries, dim), key and value (batch, kv_heads, new, dim):
    new entries only. mask: over the new entries, or over past and new ones. visible: (batch, slots), which slots are
    not padding; None: all. own: the module is the layer's own, no later one that reads the same entries; last: nobody
    reads them after it.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    visible: Tensor | None
    own: bool
    last: bool

    @property
    def new(self) -> int:
        """How many entries are new."""
        return self.key.shape[2]

    def wide(self, past: int) -> Tensor | None:
        """Return the mask if it is the caller's own over ``past`` and new entries."""
        return self.mask if self.mask is not None and self.mask.shape[-1] == past + self.new > self.new else None


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
    def attend(self, step: Step) -> Tensor:
        """Attend over the past and what is new, (batch, heads, queries, value_dim); after the last reader, settle."""

    def alone(self, step: Step) -> bool:
        """Tell whether a step's entries are settled before they are attended: a single one where it will lie, with the
        others; and later readers find them there."""
        return self.pending is None or (step.own and step.new == 1 and step.mask is None)

    @property
    def arrived(self) -> int:
        """Slots that came in, those not settled yet included."""
        return self.length

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

    def attend(self, step: Step) -> Tensor:
        """Attend over what was evicted, what is resident and what is new."""
        if self.alone(step):
            self.settle()
            return attend(step.query, self._past(step, None, self.length - 1), step.scaling)[0]
        output, _ = attend(step.query, self._all(step), step.scaling)
        if step.last:
            self.settle()
        return output

    def _past(self, step: Step, wide: Tensor | None, first_query: int) -> Iterator[Segment]:
        for piece in self.past(ordered=step.visible is not None or wide is not None):
            yield seen(piece, step, wide, first_query)

    def _all(self, step: Step) -> Iterator[Segment]:
        yield from self._past(step, step.wide(self.length), self.length)
        yield fresh(step.query, step.key, step.value, step.mask)

    @abstractmethod
    def past(self, ordered: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield all settled entries as (first slot, keys, values), (batch, kv_heads, entries, dim) each.

        Without ``ordered`` the entries of a piece may come in any order: no mask will ask which is which.
        """


def seen(piece: tuple[int, Tensor, Tensor], step: Step, wide: Tensor | None, first_query: int) -> Segment:
    """Return past entries (first slot, keys, values) as a segment, masked by ``wide`` where the caller gave a mask of
    their own; ``first_query``: the slot of the first query."""
    start, keys, values = piece
    stop, queries, device = start + keys.shape[-2], step.query.shape[2], step.query.device
    mask = (
        past_mask(first_query, queries, start, stop, visible=step.visible, device=device)
        if wide is None
        else wide[..., start:stop]
    )
    return Segment(*expanded(step.module, keys, values), mask)


def fresh(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Segment:
    """Return the segment of a step's own entries."""
    queries, new = query.shape[2], key.shape[2]
    if mask is not None:
        return Segment(key, value, mask[..., -new:])
    if queries == new:
        return Segment(key, value, causal=True)
    return Segment(key, value, new_mask(queries, new, query.device))  # only the last tokens' queries were asked for
