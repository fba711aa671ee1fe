"""How entries come back: a recall, and the reader that it makes for each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import Piece
from kvkeep.contracts.exactness import Exactness
from kvkeep.contracts.hook import PassHook
from kvkeep.contracts.part import Part, PredictedBytes, Site
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.step.plan import LayerStep


class Reader(Part):
    """How the attention of one layer reads entries that are not resident, and the state that this needs."""

    waiting: int = 0
    """The number of received slots of drafts."""

    @abstractmethod
    def attend(self, layer: Any, step: AttentionInputs) -> Tensor:
        """Return attention over past and new entries, (lanes, heads, queries, value_dim). Settle the new entries after
        the layer's last module has read them."""

    def arrive(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        """Called with the new entries of a step, (lanes, n, dim), before attention."""
        layer.resident.arrive(keys, values)

    def plan(self, layer: Any, count: int = 1) -> LayerStep | None:
        """Return the step for ``count`` more entries of each of the layer's lanes; None: :meth:`attend` computes
        them."""
        return None

    def layout(self, layer: Any) -> Sequence[Any] | None:
        """Return the layer's :meth:`~kvkeep.contracts.resident.Resident.layout`, if the reader itself has no part in
        it; else None."""
        return None

    def commit(self, layer: Any) -> None:
        """Note that the next token of the step of :meth:`plan` has run. An interrupted call can be repeated."""
        if layer.resident.length == layer.length:
            layer.resident.commit()
        layer.length += 1

    def settling(self, layer: Any, keys: Tensor, values: Tensor, mapped: bool = False) -> None:
        """Called before the new entries of a step are stored. mapped: they are mapped from a file and never change."""

    def past(self, layer: Any) -> Iterator[Piece]:
        """Yield the entries of all slots, each once; evicted ones as the store returns them."""
        yield from layer.resident.pieces()
        yield from layer.evicted.pieces(torch.empty(0, device=layer.device), layer.resident, layer.length)

    def states(self, layer: Any, evicted: Tensor) -> Tensor:
        """Return the states of evicted entries, (lanes, slots) codes. evicted: the states from the store."""
        return evicted

    def truncate(self, layer: Any, length: int) -> None:
        """Forget the slots from ``length`` on."""

    def select(self, layer: Any, lanes: Tensor) -> None:
        """Replace the lanes by those of an index."""

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Restore the result of :meth:`state`, for ``length`` slots."""


@dataclass(frozen=True)
class Recall(ABC):
    """How entries come back. A frozen dataclass whose fields are its parameters."""

    label: ClassVar[str]
    """How entries come back, in a few words; empty where methods do not name the recall."""
    source: ClassVar[str] = ""
    """The paper."""
    exactness: ClassVar[Exactness | None] = None
    """What the recall promises about the output; None: the fate's promise holds."""
    backed: ClassVar[bool] = True
    """It needs every entry in a checkpoint."""
    drafts: ClassVar[bool] = False
    """The resident entries draft tokens, which an exact pass verifies, so a checkpoint may not lose entries."""
    records: ClassVar[bool] = False
    """Ids and positions of all tokens are needed."""
    endless: ClassVar[bool] = False
    """A text may exceed the maximum context length: recalled entries get positions within it."""
    files: ClassVar[Sequence[str]] = ()
    """Parameters that may name files of this machine; a server refuses them in requests."""

    def tail(self, entries: int) -> int:
        """Return how many of a budget's ``entries`` are for drafts; 0 where there are none."""
        return 0

    def refuses(self, method: Any) -> str | None:
        """Return why this recall cannot be the recall of ``method``, a :class:`~kvkeep.policies.registry.Method`, in a
        sentence; None where it can."""
        return None

    def exact_tokens(self, geometry: ModelGeometry) -> int | None:
        """Return the number of tokens up to which every step attends to all entries, for a recall that is
        :attr:`endless`; None: a text of any length."""
        return None

    def check(self, model: Any, geometry: ModelGeometry, entries: int, chunk: int) -> None:
        """Raise UnsupportedModelError if the recall does not work with this model, or BudgetError if it does not with a
        budget of ``entries`` and chunks of ``chunk`` tokens."""

    def check_capacity(self, geometry: ModelGeometry, capacity: int | None, newest: int) -> None:
        """Raise UsageError if the recall does not work with a checkpoint of ``capacity`` entries (None: unlimited).
        newest: entries and tokens of a chunk that are evicted at a time, at most."""

    def hook(self) -> PassHook | None:
        """Return the hook around the forward passes of one cache, or None."""
        return None

    def shared(self, ledger: Ledger, pinned: int) -> Any:
        """Return the object that the readers of all layers share, or None. Those of a recall that :attr:`drafts` share
        the cache's draft passes. pinned: the number of first tokens that every step attends to."""
        return None

    @abstractmethod
    def reader(self, site: Site, shared: Any) -> Reader:
        """Return the reader of one layer."""

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> PredictedBytes:
        """Return the bytes that a layer's reader holds for ``tokens`` tokens of a row, ``away`` of them evicted."""
        return PredictedBytes()
