"""``pyramidkv``: SnapKV with budgets that fall with depth (Cai et al., arXiv:2406.02069, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.selectors.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV, with a budget beside the window that falls in a straight line from the first layer to the last."""

    leaves: ClassVar[str] = "as snapkv; later layers keep fewer"
    source: ClassVar[str] = "arXiv:2406.02069"

    beta: float = 20.0
    """The mean budget beside the window, divided by the last layer's budget beside the window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta >= 1:
            raise UsageError(f"PyramidKV's beta is 1 or more, not {self.beta:g}.")

    def budgets(self, model: Any, geometry: ModelGeometry, entries: int) -> list[Sequence[int]]:
        """Return window + max .. window + min, a straight line whose mean is ``entries``; rounded down."""
        full = [layer.index for layer in geometry.full_layers]
        window = min(self.window, entries // 2)
        least = (entries - window) / self.beta
        largest = 2 * (entries - window) - least
        budgets: list[Sequence[int]] = [(entries,)] * len(geometry.layers)
        for depth, index in enumerate(full):
            share = depth / (len(full) - 1) if len(full) > 1 else 0.5
            budgets[index] = (window + int(largest + (least - largest) * share),)
        return budgets
