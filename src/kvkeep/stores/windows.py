"""Copies of sliding windows: tokens that are read and then removed must not move a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class WindowState:
    """A layer with a sliding window, and the window's state at the time of the copy."""

    layer: Any
    keys: Tensor
    values: Tensor
    length: int
    recorded: bool

    def restore(self) -> None:
        """Restore this state in the layer."""
        self.layer.keys, self.layer.values = self.keys, self.values
        self.layer.cumulative_length, self.layer.record_past = self.length, self.recorded


def noted(layers: Sequence[Any]) -> list[WindowState]:
    """Return the present states of layers."""
    return [
        WindowState(layer, layer.keys, layer.values, layer.cumulative_length, layer.record_past) for layer in layers
    ]
