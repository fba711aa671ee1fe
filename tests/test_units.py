"""Numbers as text."""

from __future__ import annotations

import pytest

from kvkeep.units import size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (1_550_000, "1.6 MB"),
        (94_371_840, "94.4 MB"),
        (10**12, "1000.0 GB"),
    ],
)
def test_sizes_have_the_largest_unit_that_they_reach(count: int, text: str) -> None:
    assert size(count) == text
