"""Every store of rows against a plain tensor, under random operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.memory.pages import PagedRows, pages_of
from kvkeep.memory.places import Device, Disk, Place, place
from kvkeep.memory.rows import Buffer, Ring, Rows, concatenated
from kvkeep.memory.shared_rows import SharedRows

CPU = torch.device("cpu")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 23)),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
    ),
    max_size=14,
)


def stores(home: Place) -> dict[str, Rows]:
    return {
        "buffer": Buffer(block=5),
        "buffer in a place": Buffer(block=5, home=home),
        "pages": PagedRows(home, smallest=4, largest=9),
        "ring": Ring(11, home, block=4),
        "ring of none": Ring(0, home),
        "shared": SharedRows(block=5),
        "pieces": SharedRows(block=2, pieces=True),
    }


@pytest.mark.turns(3)
@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize("name", stores(Device(CPU)))
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_every_store_of_rows_equals_a_plain_tensor(name: str, where: str, operations: list[tuple[str, object]]) -> None:
    home = place(where, CPU, "/tmp")
    rows, twin, first = stores(home)[name], torch.zeros(2, 1, 0, 3), 0
    counter = 0.0
    for kind, value in operations:
        if kind == "append":
            new = torch.arange(twin.shape[0] * int(value) * 3).reshape(twin.shape[0], 1, int(value), 3) + counter  # type: ignore[call-overload]
            counter += 1000
            rows.append(new)
            twin = torch.cat([twin, new], dim=2)
            if isinstance(rows, Ring):
                first = max(first, twin.shape[2] - rows.capacity)
        elif kind == "truncate":
            rows.truncate(int(value))  # type: ignore[call-overload]
            twin = twin[:, :, : int(value)]  # type: ignore[call-overload]
            first = min(first, twin.shape[2])
        elif all(index < twin.shape[0] for index in value) and rows.length:  # type: ignore[attr-defined]
            rows.select(torch.tensor(value))
            twin = twin[torch.tensor(value)]
        assert (rows.first, rows.length) == (first, twin.shape[2])
        if first < twin.shape[2]:
            assert torch.equal(concatenated(rows, first, twin.shape[2]), twin[:, :, first:])
            lane = torch.arange(twin.shape[2] - first) % twin.shape[0]
            slot = torch.arange(first, twin.shape[2]).flip(0)
            assert torch.equal(rows.pick(lane, slot), twin[lane, 0, slot])
        if isinstance(rows, Ring):
            assert rows.data is None or rows.data.shape[2] <= rows.capacity
            stored = rows.everything()
            if stored is not None:
                assert sorted(stored[0, 0, :, 0].tolist()) == sorted(twin[0, 0, first:, 0].tolist())


def test_pages_are_as_long_as_the_appended_chunks() -> None:
    """A prompt's chunks are then read back in few pieces; single rows fill blocks."""
    pages = PagedRows(Device(CPU), smallest=4, largest=20)
    for count in (14, 1, 1, 50, 1):
        pages.append(torch.zeros(1, 1, count, 2))
    assert [page.shape[2] for page in pages.pages] == [16, 20, 20, 12] and pages.length == 67


def test_pages_of_a_long_text_are_few() -> None:
    """Linux allows a process 65,530 mappings; a model of 40 layers on disk has two stores of rows in each."""
    for count in (2**16, 2**18, 2**20, 2**24):
        pages = pages_of([512] * (count // 512))
        assert 80 * len(pages) < 65_530
        assert sum(pages) - count <= max(1024, count / 64)


def test_full_pieces_never_move() -> None:
    rows = SharedRows(4, pieces=True)
    places = list[int]()
    for count in (11, 1, 1, 30, 8, 2):
        rows.append(torch.zeros(1, 1, count, 2))
        assert [part.data_ptr() for part in rows.head][: len(places)] == places
        places = [part.data_ptr() for part in rows.head]
        assert rows.nbytes == -(-rows.length // 4) * 4 * 8
    assert len(places) == 6
    rows.freeze(rows.length)
    assert [part.data_ptr() for part in rows.head][: len(places)] == places


def test_an_append_that_fits_copies_nothing() -> None:
    buffer = Buffer(block=8)
    buffer.append(torch.zeros(1, 1, 3, 2))
    before = buffer.view().data_ptr()
    buffer.append(torch.zeros(1, 1, 5, 2))
    assert buffer.view().data_ptr() == before


@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["append", "truncate", "share"]), st.integers(0, 23))
    )
)
def test_pages_on_disk_are_stored_once_and_changes_stay_private(operations: list[tuple[int, str, int]]) -> None:
    """As below, with pages: an owner also begins with whole blocks of the owner before it."""
    home = Disk()
    owners, twins = [PagedRows(home, 4, 8) for _ in range(3)], [torch.zeros(2, 0, 3) for _ in range(3)]
    counter = 0.0
    for who, kind, value in operations:
        if kind == "append":
            new = torch.arange(6.0 * value).reshape(2, value, 3) + counter
            counter += 1000
            if value:
                owners[who].append(new)
            twins[who] = torch.cat([twins[who], new], 1)
        elif kind == "truncate":
            owners[who].truncate(value)
            twins[who] = twins[who][:, :value]
        else:
            owners[who] = PagedRows(home, 4, 8)
            for block in owners[who - 1].freeze(min(value, owners[who - 1].length)):
                owners[who].adopt(block)
            twins[who] = twins[who - 1][:, : min(value, twins[who - 1].shape[1]) // 4 * 4]
            ends = [(page.data_ptr(), page.data_ptr() + page.nbytes) for page in owners[who - 1].pages]
            assert all(any(low <= page.data_ptr() < high for low, high in ends) for page in owners[who].pages)
        for owner, twin in zip(owners, twins, strict=True):
            assert owner.length == twin.shape[1]
            if owner.length:
                assert torch.equal(concatenated(owner, 0, owner.length), twin)


@settings(max_examples=60, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["append", "truncate", "share"]), st.integers(0, 23))
    )
)
def test_shared_rows_are_stored_once_and_changes_stay_private(operations: list[tuple[int, str, int]]) -> None:
    """Three owners append, truncate, and restart with rows of the owner before them, which takes no more memory."""
    owners, twins = [SharedRows(4, pieces=True) for _ in range(3)], [torch.zeros(1, 2, 0, 3) for _ in range(3)]
    counter = 0.0
    for who, kind, value in operations:
        if kind == "append":
            new = torch.arange(6.0 * value).reshape(1, 2, value, 3) + counter
            counter += 1000
            owners[who].append(new)
            twins[who] = torch.cat([twins[who], new], 2)
        elif kind == "truncate":
            owners[who].truncate(value)
            twins[who] = twins[who][:, :, :value]
        elif twins[who - 1].shape[2]:
            owners[who] = SharedRows(4, pieces=True)
            twins[who] = twins[who - 1][:, :, : value + 1]
            count, before = twins[who].shape[2], owners[who - 1].nbytes
            shareable = owners[who - 1].shareable(count)
            for block in owners[who - 1].freeze(count):
                owners[who].adopt(block)
            assert owners[who].length == shareable and owners[who - 1].nbytes <= before
            if owners[who].length < count:
                owners[who].append(concatenated(owners[who - 1], owners[who].length, count))
            stored = [part.data_ptr() for part in owners[who].head]
            assert stored == [part.data_ptr() for part in owners[who - 1].head][: len(stored)]
            assert count // 4 * 4 - 4 <= shareable <= count
        for owner, twin in zip(owners, twins, strict=True):
            assert owner.length == twin.shape[2]
            parts = [(part.untyped_storage().nbytes(), part.nbytes) for part in owner.head]
            assert all(sizes in [(rows * 2 * 3 * 4,) * 2 for rows in (4, 8)] for sizes in parts)
            if owner.length:
                assert torch.equal(owner.view(), twin)
                half = owner.length // 2
                assert torch.equal(concatenated(owner, half, owner.length), twin[:, :, half:])
