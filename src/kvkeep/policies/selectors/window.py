"""``window``: the newest entries stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.contracts.selector import Candidates, Selector


@dataclass(frozen=True)
class Window(Selector):
    """The newest entries stay."""

    leaves: ClassVar[str] = "oldest"
    source: ClassVar[str] = "kv-direct section 5.6 (sliding window)"
    of_any_layer: ClassVar[bool] = True

    def rank(self, entries: Candidates) -> Tensor:
        return entries.slots


@dataclass(frozen=True)
class OldestFirst(Window):
    """The same in a ring, for fates that take entries in the order of the text and in all heads at the same time."""

    in_order: ClassVar[bool] = True
