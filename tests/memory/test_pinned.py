"""Rows in pinned memory, beside plain tensors; on the pretended GPU, because nothing is pinned without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretended_gpu import PretendedGpu

from kvkeep.memory.pinned import PinnedRows, page_of, pinned_bytes
from kvkeep.memory.rows import BLOCK, concatenated

KEY, VALUE = 6, 10


@pytest.fixture(autouse=True, scope="module")
def gpu() -> Iterator[PretendedGpu]:
    with PretendedGpu() as entered:
        yield entered


def test_rows_are_those_of_tensors_after_every_change() -> None:
    rows, twin = PinnedRows(KEY, VALUE, lambda: None), torch.zeros(2, 0, KEY + VALUE)
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        kind = number % 5
        if kind < 3:
            new = torch.randn(len(twin), 1 + 97 * kind * number % 700, KEY + VALUE, generator=generator)
            rows.keys.append(new[..., :KEY])
            assert rows.length == twin.shape[1]  # only keys have come
            rows.values.append(new[..., KEY:])
            twin = torch.cat([twin, new], 1)
        elif kind == 3:
            length = 1 + int((twin.shape[1] - 1) * torch.rand((), generator=generator))
            rows.truncate(length)
            twin = twin[:, :length]
        else:
            index = [[1, 0], [1, 1, 0], [0, 0], [0, 1]][number // 5 % 4]
            rows.select(torch.tensor(index))
            twin = twin[index]
        assert rows.length == twin.shape[1] and rows.lanes == len(twin)
        for part, expected in ((rows.keys, twin[..., :KEY]), (rows.values, twin[..., KEY:])):
            assert torch.equal(concatenated(part, rows.length // 3, rows.length), expected[:, rows.length // 3 :])
        lane, slot = torch.tensor([1, 0, 1]), torch.tensor([0, rows.length - 1, rows.length // 2])
        assert torch.equal(rows.pick(lane, slot), twin[lane, slot])
        assert all(place.is_contiguous() for _, place in rows.places(0, rows.length))
        assert sum(map(len, rows.pages[:-1])) < rows.length, "a page without rows is freed"


@given(lanes=st.integers(1, 9), counts=st.lists(st.integers(0, 3000), max_size=6))
def test_a_plan_knows_the_bytes_and_torch_rounds_none_up(lanes: int, counts: list[int]) -> None:
    rows, row_bytes = PinnedRows(KEY, VALUE, lambda: None), lanes * (KEY + VALUE) * 4
    for count in counts:
        rows.keys.append(torch.zeros(lanes, count, KEY))
        rows.values.append(torch.zeros(lanes, count, VALUE))
    assert rows.nbytes == pinned_bytes(counts, row_bytes)
    for page in rows.pages:
        size = page.untyped_storage().nbytes()
        assert size & (size - 1) == 0 and size - page.nbytes < row_bytes and page.is_pinned()
    unused = sum(map(len, rows.pages)) - rows.length
    assert unused <= max(BLOCK, rows.length // 8)


def test_a_page_is_an_eighth_of_those_before() -> None:
    assert page_of(1, 0, 4096) == (256, 2**20)
    assert page_of(1, 16_384, 4096) == (2048, 2**23)
    assert page_of(1, 16_384, 768) == (1365, 2**20)  # SmolLM2's layer: an eighth would be 2,048 rows, or 1.5 times this
    assert page_of(5000, 0, 4096) == (4096, 2**24)
