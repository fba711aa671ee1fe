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
from kvkeep.contracts.part import Part
from kvkeep.contracts.site import PredictedBytes, Site
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.step.plan import LayerStep


class Reader(Part):
    """How the attention of one layer reads what is not resident, and what it keeps for that."""

    certificate: Any = None
    """What attention can have left out, a :class:`~kvkeep.stores.readers.selective.Certificate`; None where that is
    nothing."""
    waiting: int = 0
    """Slots that came in and wait for a decision."""

    @abstractmethod
    def attend(self, layer: Any, step: AttentionInputs) -> Tensor:
        """Return attention over the past and what is new, (lanes, heads, queries, value_dim); settle the new entries
        when the layer's last module has read them."""

    def arrive(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        """Called with the new entries of a step, (lanes, n, dim), before it attends."""
        layer.resident.arrive(keys, values)

    def plan(self, layer: Any) -> LayerStep | None:
        """Return the step for one more entry of each of the layer's lanes; None: :meth:`attend` computes it."""
        return None

    def settling(self, layer: Any, keys: Tensor, values: Tensor) -> None:
        """Called before the new entries of a step are stored."""

    def commit(self, layer: Any, count: int, agreed: bool) -> None:
        """Keep the first ``count`` of the entries that wait for the round's decision; ``agreed``: all drafts were
        right."""

    def choose(self, layer: Any) -> None:
        """Choose the resident entries anew, before the round drafts again."""

    def recall(self, layer: Any, slots: Tensor, limit: int) -> int:
        """Make those of ``slots`` (n,) resident that can come back, the first ``limit`` of every lane; return how many
        that were in all."""
        return 0

    def past(self, layer: Any) -> Iterator[Piece]:
        """Yield the entries of all slots, each once; those that were evicted as they come back."""
        yield from layer.resident.pieces()
        yield from layer.evicted.pieces(torch.empty(0, device=layer.device), layer.resident, layer.length)

    def states(self, layer: Any, evicted: Tensor) -> Tensor:
        """Return what became of evicted entries, (lanes, slots) codes, given what the store says of them."""
        return evicted

    def truncate(self, layer: Any, length: int) -> None:
        """Forget the slots from ``length`` on."""

    def select(self, layer: Any, lanes: Tensor) -> None:
        """Make the lanes those of an index."""

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as of ``length`` slots."""


@dataclass(frozen=True)
class Recall(ABC):
    """How entries come back. A frozen dataclass whose fields are its parameters."""

    label: ClassVar[str]
    """How, in a few words; empty where methods do not name it."""
    source: ClassVar[str] = ""
    """The paper."""
    exactness: ClassVar[Exactness | None] = None
    """What it promises; None: the fate's."""
    backed: ClassVar[bool] = True
    """It needs every entry in a checkpoint."""
    reads_single: ClassVar[bool] = False
    """It brings back single entries, so none may be merged into others."""
    place: ClassVar[str | None] = None
    """Where its checkpoints are by default; None: as for every method."""
    loses: ClassVar[bool] = False
    """It goes on where a checkpoint of limited capacity has lost entries."""
    reads_all: ClassVar[bool] = False
    """Every step attends to all entries of the checkpoint, so that none has to be resident."""
    drafts: ClassVar[bool] = False
    """It decodes in rounds of draft and verify."""
    records: ClassVar[bool] = False
    """Ids and positions of all tokens are needed."""
    across_heads: ClassVar[bool] = False
    """What comes back in one KV head depends on others."""
    files: ClassVar[Sequence[str]] = ()
    """Parameters that may name files of this machine, which no request to a server may give."""

    def tail(self, entries: int) -> int:
        """Return how many of a budget's ``entries`` are for tokens that wait for a decision, 0 where none does."""
        return 0

    def entries(self, away: int) -> int:
        """Return how many of ``away`` entries of a KV head come back for a step, at most."""
        return away

    def swapped(self, away: int) -> int:
        """Return how many of ``away`` entries of a KV head may be resident after a step, in place of as many others."""
        return 0

    def refuses(self, method: Any) -> str | None:
        """Return why it cannot be the recall of ``method``, a :class:`~kvkeep.policies.methods.Method`, in a sentence,
        or None."""
        return None

    def hook(self) -> PassHook | None:
        """Return what it does around the passes of one cache, None for nothing."""
        return None

    @abstractmethod
    def reader(self, site: Site, round: Any) -> Reader:
        """Return the reader of one layer; ``round``: of draft and verify, None where there is none."""

    def holds(self, layer: LayerGeometry, geometry: ModelGeometry, tokens: int, away: int) -> PredictedBytes:
        """Return what the reader of a layer will hold for ``tokens`` tokens of a row, ``away`` of them not resident."""
        return PredictedBytes()
