"""A pretended GPU, and the graphs that are captured on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pretended_gpu import PretendedGpu
from pretended_graphs import CapturedGraph, pretended_graphs


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    """The GPU."""
    with PretendedGpu() as entered:
        yield entered


@pytest.fixture
def graphs(gpu: PretendedGpu) -> Iterator[list[CapturedGraph]]:
    """All captured graphs."""
    with pretended_graphs() as made:
        yield made
