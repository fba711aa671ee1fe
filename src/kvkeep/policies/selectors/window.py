"""``window``: the newest entries stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.policies.selectors.base import Selector
from kvkeep.stores.parts import Candidates


@dataclass(frozen=True)
class Window(Selector):
    """The last B entries."""

    leaves: ClassVar[str] = "oldest"
    source: ClassVar[str] = "kv-direct section 5.6 (sliding window)"

    def rank(self, entries: Candidates) -> Tensor:
        """By slot."""
        return entries.slots
