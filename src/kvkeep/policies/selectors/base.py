"""What a selector is: parameters, and three functions of tensors. It holds no entries and no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvkeep.geometry import ModelGeometry
from kvkeep.stores.parts import Candidates

STAYS = float("inf")


@dataclass(frozen=True)
class Selector(ABC):
    """Who stays. One file for each: a frozen dataclass whose fields are its parameters, :meth:`rank`, and where it
    needs them :meth:`enter` and :meth:`observe`. Tensors are (lanes, entries), a lane being one KV head of one row.

    leaves: who leaves, in a few words; source: the paper.
    """

    leaves: ClassVar[str]
    source: ClassVar[str]

    @property
    def watches(self) -> int | None:
        """How many of a step's last queries :meth:`observe` is told the attention of: 0 none, None all."""
        return 0

    @property
    def most(self) -> bool:
        """Whether :meth:`observe` is told the most that any query and head gave, instead of sum and mean."""
        return False

    @property
    def enters(self) -> bool:
        """Whether new entries get a first mark from :meth:`enter`; otherwise it is 0."""
        return False

    @property
    def reads(self) -> bool:
        """Whether :meth:`rank` and :meth:`observe` need the keys and values themselves."""
        return False

    @property
    def ties(self) -> bool:
        """Whether several entries may well rank the same; the oldest of them leaves first."""
        return False

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return the entries of each layer's KV heads (one number: of all its heads), ``entries`` on average."""
        return [(entries,)] * len(geometry.layers)

    def sinks_in_cache(self, forgets: bool) -> int | None:
        """Return how many first entries are fixed where positions are within the cache, None where they are those of
        the text. ``forgets``: what leaves never comes back."""
        return None

    def enter(self, entries: Candidates, keys: Tensor) -> Tensor:
        """Return the first marks of new entries, and of those that come back; keys (lanes, entries, dim), as cached."""
        return torch.zeros(entries.slots.shape, device=keys.device)

    def observe(self, entries: Candidates, weights: Tensor, queries: int) -> Tensor:
        """Return the marks after a step: ``weights`` is the attention received from its last ``queries`` queries,
        summed over them, mean over the query heads of the lane; the most of any where :attr:`most`."""
        assert entries.marks is not None
        return entries.marks

    @abstractmethod
    def rank(self, entries: Candidates) -> Tensor:
        """Return the order of leaving: the lowest first. Empty columns and padding are taken care of."""
