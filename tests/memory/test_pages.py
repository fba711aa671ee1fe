"""Pages of the newest rows within a capacity, beside a plain tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.memory.pages import RecentPages, recent_pages_of
from kvkeep.memory.places import Device, Disk
from kvkeep.memory.rows import concatenated

CAPACITY, SMALLEST, LARGEST = 40, 4, 12
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, LARGEST)),
        st.tuples(st.just("truncate"), st.integers(0, 9)),
        st.tuples(st.just("select"), st.sampled_from([[0], [1, 0], [1, 1, 0]])),
    ),
    max_size=40,
)


@pytest.mark.parametrize("place", ["device", "disk"])
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_the_newest_rows_and_the_beginning_stay_within_the_capacity(
    place: str, operations: list[tuple[str, int | list[int]]]
) -> None:
    home = Device(torch.device("cpu")) if place == "device" else Disk("/tmp")
    rows, twin = RecentPages(CAPACITY, home, SMALLEST, LARGEST), torch.zeros(2, 0, 3)
    longest = 0
    for number, (kind, value) in enumerate(operations):
        if isinstance(value, list):
            if max(value) < len(twin) and len(twin[0]):
                rows.select(torch.tensor(value))
                twin = twin[value]
        elif kind == "append":
            new = torch.arange(len(twin) * value * 3.0).view(len(twin), value, 3) + 1000 * number
            rows.append(new)
            twin = torch.cat([twin, new], 1)
        elif rows.first < len(twin[0]) - value:
            rows.truncate(len(twin[0]) - value)
            twin = twin[:, : len(twin[0]) - value]
        length = twin.shape[1]
        assert rows.length == length and rows.first % SMALLEST == 0
        assert rows.nbytes + rows.beginning.nbytes <= CAPACITY * len(twin) * 12, (
            "never more than the capacity is allocated"
        )
        longest = max(longest, length)
        assert rows.first <= max(0, longest - (CAPACITY - 2 * LARGEST - SMALLEST)), (
            "no page is freed before it has to be"
        )
        if rows.first < length:
            assert torch.equal(concatenated(rows, rows.first, length), twin[:, rows.first :])
        assert bool(rows.beginning.length) == bool(rows.first)
        held = [*range(bool(rows.first)), *range(rows.first // SMALLEST, length // SMALLEST)]
        if held:
            numbers = torch.tensor(held).expand(len(twin), -1)
            wanted = torch.stack([twin[:, SMALLEST * at : SMALLEST * (at + 1)] for at in held], 1)
            assert torch.equal(rows.passages(numbers, SMALLEST), wanted)


@given(count=st.integers(1, 300), capacity=st.integers(3 * SMALLEST, 100), step=st.integers(1, SMALLEST))
def test_a_plan_knows_the_pages_beforehand(count: int, capacity: int, step: int) -> None:
    rows = RecentPages(capacity, Device(torch.device("cpu")), SMALLEST, LARGEST)
    for start in range(0, count, step):
        rows.append(torch.zeros(1, min(step, count - start), 1))
    pages = recent_pages_of(count, capacity, SMALLEST, LARGEST)
    assert pages == [page.shape[-2] for page in [*rows.beginning.pages, *rows.pages]]


@given(pieces=st.lists(st.integers(0, LARGEST), max_size=30))
def test_what_is_lost_depends_on_the_number_of_rows_only(pieces: list[int]) -> None:
    """A restored session appends all rows at once, and then goes on as the session did."""
    home, length = Device(torch.device("cpu")), sum(pieces)
    one, other = (RecentPages(CAPACITY, home, SMALLEST, LARGEST) for _ in range(2))
    for count in pieces:
        one.append(torch.zeros(1, count, 1))
    for _ in range(length):
        other.append(torch.zeros(1, 1, 1))
    assert (one.first, one.length, one.beginning.length) == (other.first, other.length, other.beginning.length)
