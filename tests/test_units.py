"""Numbers as text."""

from __future__ import annotations

import pytest

from kvkeep.units import size, three_digits


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


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (9.996, "10"), (342.4, "342"), (999.6, "1,000"), (2663.7, "2,664")]
)
def test_large_numbers_have_no_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text
