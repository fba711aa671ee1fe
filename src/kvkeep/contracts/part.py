"""What a layer consists of."""

from __future__ import annotations

from abc import ABC

from torch import Tensor

from kvkeep.memory.extent import Extent


class Part(ABC):
    """What a layer consists of: it holds state of one layer of one cache."""

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots, scores, counts, and what else is kept beside entries."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        return {}

    def check(self, extent: Extent) -> None:
        """Raise ShapeError where what came from a file cannot be what a layer of ``extent`` holds. All of the cache has
        been restored by then."""
