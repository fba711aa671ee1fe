"""Which entries are evicted: a selector, and what it is shown."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry

STAYS = float("inf")
"""The rank of an entry that is not evicted."""


class Asking(NamedTuple):
    """The queries of a step as they would be on average if they were asked from the positions ahead."""

    queries: Tensor
    """(lanes, heads, n, key_dim) float32."""
    slots: Tensor
    """(lanes, n) int, those they were asked from, -1 for padding."""
    scaling: float
    """Of their products with keys."""


@dataclass(frozen=True)
class Candidates:
    """The entries a selector ranks. Tensors are (lanes, entries); the newest come last, the others in any order."""

    slots: Tensor
    """int64, -1 where a column is empty (its rank is not asked for)."""
    scores: Tensor | None
    """What the selector made of each, float32; None until there is something."""
    first: Tensor | int
    """(lanes, 1), the first real slot of each lane's row; 0 where there is no padding."""
    length: int
    """Slots of the sequence, the new ones included."""
    new: int
    """How many of the entries are new."""
    budget: int
    """How many will stay."""
    heads: int
    """Lanes of one row."""
    layer: int
    keys: Tensor | None = None
    """(lanes, entries, key_dim) as cached; None for selectors that do not read them (:attr:`Selector.needs_kv`)."""
    values: Tensor | None = None
    """(lanes, entries, value_dim), likewise."""
    asking: Asking | None = None
    """The queries of a step whose entries are new, for selectors that look ahead."""


class ReconstructionPieces(NamedTuple):
    """How a text is read once more."""

    piece: int
    """Tokens at a time, whose attention is compared among these and the sinks."""
    sinks: int
    """The first entries of the text that every piece is compared with."""


@dataclass(frozen=True)
class Selector(ABC):
    """Which entries are evicted. A frozen dataclass: its fields are its parameters, and it has :meth:`rank`, and where
    it needs them :meth:`arrive` and :meth:`observe`. It holds no entries and no state: scores, one number for each
    entry, are kept beside the entries and move with them."""

    leaves: ClassVar[str]
    """Which entries are evicted, in a few words."""
    source: ClassVar[str]
    """The paper."""
    keeps_all: ClassVar[bool] = False
    """No entry is evicted."""
    in_order: ClassVar[bool] = False
    """The oldest entry is evicted, in all heads at once, so that entries lie in a ring."""
    by_age: ClassVar[bool] = False
    """Age alone decides which entries are evicted."""
    scores_arrivals: ClassVar[bool] = False
    """New entries get a first score from :meth:`arrive`; otherwise it is 0."""
    needs_kv: ClassVar[bool] = False
    """:meth:`rank` and :meth:`observe` need the keys and values themselves."""
    of_any_layer: ClassVar[bool] = False
    """Lanes of several layers may be shown to it as rows of one."""
    may_tie: ClassVar[bool] = False
    """Several entries may well rank the same; the oldest of them is evicted first."""
    across_heads: ClassVar[bool] = False
    """Which entries of one KV head are evicted depends on other heads."""
    reduce: ClassVar[str] = "sum"
    """How the attention of several queries and heads becomes one number: "sum" over queries of the mean over heads, or
    "max" over both."""
    files: ClassVar[Sequence[str]] = ()
    """Parameters that may name files of this machine, which no request to a server may give."""

    @property
    def budgeted(self) -> bool:
        """Whether it needs a budget."""
        return True

    @property
    def layout(self) -> str:
        """How entries lie in memory where all stay: "dynamic", "static" or "paged"."""
        return ""

    @property
    def observation_window(self) -> int | None:
        """How many of a step's last queries :meth:`observe` learns the attention of: 0 none, None all."""
        return 0

    @property
    def ahead(self) -> int:
        """Over how many positions ahead the queries are averaged that :meth:`observe` is shown; 0: it is shown none.
        Needs rotary embeddings."""
        return 0

    @property
    def reconstruction(self) -> ReconstructionPieces | None:
        """How a text is read once more before any of it is evicted, so that :meth:`shares` can count the entries of
        each head; None: it is not. Until then nothing is chosen: the text is read as ``kv-direct`` reads it."""
        return None

    def shares(self, received: Sequence[Tensor], rows: int, entries: int) -> list[list[int]]:
        """Return the entries of each full layer's lanes, ``entries`` on average over the lanes of one of ``rows``.
        received: of each layer (lanes, slots) float32, the most attention that each entry received of the
        reconstruction, which is its score; -inf for padding."""
        return [[entries]] * len(received)

    @property
    def accumulates(self) -> bool:
        """Whether scores are the attention of all queries so far, added up."""
        return False

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return the entries of each layer's KV heads (one number: of all its heads), ``entries`` on average. Where
        they are measured on the model and there is none yet (``model`` None), layers and heads are taken to be
        alike."""
        return [(entries,)] * len(geometry.layers)

    def sinks_in_cache(self, drops: bool) -> int | None:
        """Return how many first entries are fixed where positions are within the cache, None where they are those of
        the text. ``drops``: evicted entries never come back."""
        return None

    def arrive(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return the first scores of new entries and of those that come back; keys (lanes, entries, dim) as cached."""
        return torch.zeros(entries.slots.shape, device=keys.device)

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the scores after a step: ``weights`` (lanes, entries) is the attention received from its last
        ``queries`` queries, by :attr:`reduce`. By default that attention itself."""
        return weights

    def rank(self, entries: Candidates) -> Tensor:
        """Return the order of eviction, the lowest first: by default the scores. Empty columns and padding are taken
        care of."""
        if entries.scores is None:
            raise UsageError(
                f"'{type(self).__name__}' has no rank of its own and no scores to rank by: it needs rank, "
                "observation_window or scores_arrivals."
            )
        return entries.scores
