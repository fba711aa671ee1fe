"""Selectors, which decide which entries are evicted, and their inputs."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry

STAYS = float("inf")
"""The rank of an entry that is not evicted."""


class Asking(NamedTuple):
    """The queries of a step, each rotated to the positions ahead and averaged over them."""

    queries: Tensor
    """(lanes, heads, n, key_dim) float32."""
    slots: Tensor
    """(lanes, n) int, the slots of the queries, -1 for padding."""
    scaling: float
    """The factor of their products with keys."""


@dataclass(frozen=True)
class Candidates:
    """The entries that a selector ranks. Tensors are (lanes, entries), with the newest last."""

    slots: Tensor
    """int64, -1 where a column is empty; the rank of an empty column is ignored."""
    scores: Tensor | None
    """The selector's scores, float32; None before the first."""
    first: Tensor | int
    """(lanes, 1), the first real slot of each lane's row; 0 where there is no padding."""
    length: int | Tensor
    """Slots of the sequence, the new ones included. A tensor without dimensions, on the device, in a pass that is
    captured: a selector that reads it on the host (``int(length)``) is not captured."""
    new: int
    """The number of new entries."""
    budget: int
    """The number of entries that stay."""
    heads: int
    """Lanes of one row."""
    layer: int
    keys: Tensor | None = None
    """(lanes, entries, key_dim) as cached; None for selectors that do not read them (:attr:`Selector.needs_kv`)."""
    values: Tensor | None = None
    """(lanes, entries, value_dim) as cached; None for selectors that do not read them."""
    asking: Asking | None = None
    """The queries of a step whose entries are new, for selectors that look ahead."""


class Excerpt(NamedTuple):
    """A part of a text that is read a second time in place of the whole."""

    instruction: str
    """Words before it."""
    slots: Callable[[Tensor, Tensor | None, Callable[[Tensor], Tensor]], Tensor]
    """Return its slots, (rows, n) in order. Given are the ids of the text (rows, slots), False for padding (the same)
    or None, and the model's embedding of ids, (any) to (any, hidden size)."""


class ReconstructionPieces(NamedTuple):
    """How a text is read a second time."""

    piece: int
    """Tokens read at a time."""
    sinks: int
    """The first entries of the text, which take part in the attention of every piece."""
    reader: Any = None
    """The subclass of :class:`~kvkeep.reconstruction.ReconstructionReader` that scores entries by the attention that
    they receive; None: that class."""
    excerpt: Excerpt | None = None
    """The part of the text that is read, at most a piece; None: all of it."""
    during: Callable[[Any, Sequence[Any]], AbstractContextManager[None]] | None = None
    """Return the context of a pass, given the cache and the readers of its full layers; None: there is none."""


@dataclass(frozen=True)
class Selector(ABC):
    """Which entries are evicted. A frozen dataclass whose fields are its parameters. It defines :meth:`rank`, and where
    it needs them :meth:`arrive` and :meth:`observe`. It is stateless: scores, one number for each entry, are kept
    beside the entries and move with them."""

    leaves: ClassVar[str]
    """Which entries are evicted, in a few words."""
    source: ClassVar[str]
    """The paper."""
    keeps_all: ClassVar[bool] = False
    """No entry is evicted: the layers of a cache are those of :meth:`layer`."""
    budgeted: ClassVar[bool] = True
    """It needs a budget."""
    in_order: ClassVar[bool] = False
    """The oldest entry is evicted in all heads at once. Entries therefore form a ring."""
    scores_arrivals: ClassVar[bool] = False
    """New entries get a first score from :meth:`arrive`; otherwise it is 0."""
    scores_by_slot: ClassVar[bool] = False
    """:meth:`arrive` reads only the slots of entries, so a step can be planned before its keys are known."""
    needs_kv: ClassVar[bool] = False
    """:meth:`rank` and :meth:`observe` read keys and values."""
    of_any_layer: ClassVar[bool] = False
    """It may rank the lanes of several layers as rows of one layer."""
    may_tie: ClassVar[bool] = False
    """Entries often have equal ranks; the oldest of them is evicted first."""
    across_heads: ClassVar[bool] = False
    """The evicted entries of one KV head depend on other heads."""
    divides: ClassVar[bool] = False
    """Whenever a chunk overflows a layer's budget, :meth:`shares` divides that budget between its lanes anew."""
    reduce: ClassVar[str] = "sum"
    """How the attention of several queries and heads becomes one number: "sum" over queries of the mean over heads, or
    "max" over both."""
    files: ClassVar[Sequence[str]] = ()
    """Parameters that may name files of this machine; a server refuses them in requests."""

    @property
    def observation_window(self) -> int | None:
        """The number of a step's last queries whose attention :meth:`observe` receives; None: all."""
        return 0

    @property
    def ahead(self) -> int:
        """The number of positions ahead over which the queries for :meth:`observe` are averaged; 0: it gets no queries.
        Needs rotary embeddings."""
        return 0

    @property
    def reconstruction(self) -> ReconstructionPieces | None:
        """How a text is read a second time before any of it is evicted, so that :meth:`shares` can count the entries of
        each head; None: the text is read once. The first reading is that of ``kv-direct``, before any choice."""
        return None

    def shares(self, received: Sequence[Tensor], rows: int, entries: int) -> list[list[int]]:
        """Return the number of entries of each full layer's lanes, for ``rows`` rows: ``entries`` on average over the
        lanes of a row. received: for each layer (lanes, slots) float32, the scores of the entries in the
        reconstruction (:class:`ReconstructionPieces`); -inf for padding. A selector that :attr:`divides` gets the
        ranks of one layer's resident and new entries instead, -inf for empty columns."""
        return [[entries]] * len(received)

    def layer(self, entries: int | None, pieces: bool) -> Any:
        """Return an empty :class:`~kvkeep.stores.dynamic.DynamicLayer`. Called only where the selector
        :attr:`keeps_all`. entries: the budget, where it is :attr:`budgeted`. pieces: attention reads the layer's pieces
        where they lie."""
        raise TypeError(f"'{type(self).__name__}' evicts entries, so it makes no layer of its own.")

    @property
    def accumulates(self) -> bool:
        """Whether scores are sums of the attention of all queries so far."""
        return False

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return the number of entries of each layer's KV heads (one number: the same for all heads), ``entries`` on
        average. A selector that measures budgets on the model divides evenly where ``model`` is None."""
        return [(entries,)] * len(geometry.layers)

    def sinks_in_cache(self, drops: bool) -> int | None:
        """Return the number of fixed first entries where positions are places in the cache; None where positions are
        those of the text. drops: evicted entries never come back."""
        return None

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return the first scores of new entries and of those that come back; keys (lanes, entries, dim) as cached."""
        return torch.zeros(entries.slots.shape, device=keys.device)

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the scores after a step, by default ``weights``. weights: (lanes, entries), the attention received
        from its last ``queries`` queries, by :attr:`reduce`."""
        return weights

    def rank(self, entries: Candidates) -> Tensor:
        """Return the ranks, by default the scores; the entry with the lowest is evicted first. The caller handles empty
        columns and padding."""
        if entries.scores is None:
            raise UsageError(
                f"'{type(self).__name__}' has no rank of its own and no scores to rank by: it needs rank, "
                "observation_window or scores_arrivals."
            )
        return entries.scores
