"""Sliding windows as they were: what is read for a while and taken back must not move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class WindowState:
    """A layer with a sliding window of its own, as it was."""

    layer: Any
    keys: Tensor
    values: Tensor
    length: int
    recorded: bool

    def restore(self) -> None:
        """Make the layer so again."""
        self.layer.keys, self.layer.values = self.keys, self.values
        self.layer.cumulative_length, self.layer.record_past = self.length, self.recorded


def noted(layers: Sequence[Any]) -> list[WindowState]:
    """Return layers as they are."""
    return [
        WindowState(layer, layer.keys, layer.values, layer.cumulative_length, layer.record_past) for layer in layers
    ]
