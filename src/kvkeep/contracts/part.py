"""The base class of a layer's parts."""

from __future__ import annotations

from abc import ABC

from torch import Tensor

from kvkeep.memory.extent import Extent


class Part(ABC):
    """A part of a layer. It holds state of one layer of one cache."""

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes allocated for slots, scores, counts and other data beside entries."""
        return 0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        return {}

    def check(self, extent: Extent) -> None:
        """Raise ShapeError where the state read from a file does not fit a layer of ``extent``. Called after the whole
        cache is restored."""
