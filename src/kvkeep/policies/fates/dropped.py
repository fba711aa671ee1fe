"""``drop``: what leaves is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.policies.fates.base import Fate
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.whereabouts import Whereabouts


@dataclass(frozen=True)
class Drop(Fate):
    """Nothing is kept of what leaves."""

    label: ClassVar[str] = "dropped"
    recall: ClassVar[str] = "never"
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Return the one that forgets."""
        return Forgetting()


class Forgetting:
    """A fate at work that holds nothing."""

    forgets = True
    compressed_bytes = 0
    bookkeeping_bytes = 0

    def take(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, marks: Tensor | None) -> None:
        """Not called: nothing is wanted."""

    def recall(self, layer: SelectedLayer, query: Tensor) -> Iterator[tuple[Tensor, bool, Tensor, Tensor]]:
        """Yield nothing."""
        return iter(())

    def whereabouts(self, layer: SelectedLayer, length: int) -> Tensor:
        """All that left is gone."""
        return torch.full((layer.rows, layer.heads, length), Whereabouts.DROPPED)

    def truncate(self, length: int) -> None:
        """Nothing is held."""

    def select(self, index: Tensor) -> None:
        """Nothing is held."""

    def state(self) -> dict[str, Tensor]:
        """Nothing is held."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Nothing is held."""
