"""The count sketch: hashes, cells, and medians."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.attention.portable import scattered
from kvkeep.stores.evicted.sketch import CountSketch, places

ROWS = 3


def filled(
    count: int, slots: int, dim: int, signed: bool = True, *, seed: int = 0, lanes: int = 1
) -> tuple[CountSketch, torch.Tensor, torch.Tensor]:
    """A sketch of normal vectors, where they are, and the vectors."""
    vectors = torch.randn(lanes, count, dim, generator=torch.Generator().manual_seed(seed))
    at = places(torch.arange(count).expand(lanes, -1), ROWS, slots, seed)
    sketch = CountSketch(lanes, ROWS, slots, dim, signed, like=vectors)
    sketch.insert(at, vectors)
    return sketch, at, vectors


# -- hashes -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20))
def test_hashes_are_integer_arithmetic(numbers: list[int]) -> None:
    """The same as whole numbers give without any tensor: nothing depends on a device, a dtype or a generator."""

    def reference(number: int) -> int:
        for multiplier in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
            number = ((number ^ (number >> 29)) * multiplier + 2**63) % 2**64 - 2**63
        return (number >> 33) & 0x7FFFFFFF

    assert scattered(torch.tensor(numbers)).tolist() == [reference(number) for number in numbers]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places_depend_on_the_id_and_the_seed_alone(dtype: torch.dtype) -> None:
    ids = torch.arange(1000, dtype=dtype)
    whole = places(ids, ROWS, 50, seed=7)
    assert whole.dtype == torch.int64 and whole.shape == (ROWS, 1000)
    assert torch.equal(places(ids.flip(0).view(10, 100), ROWS, 50, seed=7), whole.flip(1).view(ROWS, 10, 100))
    assert (places(ids, ROWS, 50, seed=8) != whole).float().mean() > 0.9
    for row, own in enumerate(whole % 150):
        assert (own // 50 == row).all()


def test_places_are_spread_evenly_and_rows_do_not_know_each_other() -> None:
    ids, slots = torch.arange(60_000), 40
    whole = places(ids, ROWS, slots)
    cells, negative = whole % (ROWS * slots) % slots, whole >= ROWS * slots
    chi = [(torch.bincount(own, minlength=slots) - 1500).double().square().sum() / 1500 for own in cells]
    assert all(value < 90 for value in chi)  # 39 degrees of freedom: one in 10**5 is above
    assert ((negative.float().mean(1) - 0.5).abs() < 0.01).all()
    for one, other in itertools.combinations(range(ROWS), 2):
        assert abs((cells[one] == cells[other]).float().mean() - 1 / slots) < 0.004
        assert abs((negative[one] == negative[other]).float().mean() - 0.5) < 0.01


# -- insert and delete ------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 40),
    slots=st.integers(1, 12),
    lanes=st.integers(1, 3),
    signed=st.booleans(),
    cut=st.integers(0, 40),
    seed=st.integers(0, 999),
)
def test_batches_equal_one_by_one(count: int, slots: int, lanes: int, signed: bool, cut: int, seed: int) -> None:
    """Whole, in two parts, or one at a time, with empty places between; and against plain loops."""
    at, vectors = filled(count, slots, 5, signed, seed=seed, lanes=lanes)[1:]
    there = torch.rand(lanes, count, generator=torch.Generator().manual_seed(seed)) > 0.2
    sketches = []
    for steps in ([count], [min(cut, count), count - min(cut, count)], [1] * count):
        sketch = CountSketch(lanes, ROWS, slots, 5, signed, like=vectors)
        for own, some, which in zip(at.split(steps, 2), vectors.split(steps, 1), there.split(steps, 1), strict=True):
            sketch.insert(own.int(), some, which)
        sketches.append(sketch)
    size = ROWS * slots
    cells = torch.zeros(lanes, size, 5)
    for lane, number, row in itertools.product(range(lanes), range(count), range(ROWS)):
        if there[lane, number]:
            place = int(at[row, lane, number])
            sign = -1 if signed and place >= size else 1
            cells[lane, place % size] += sign * vectors[lane, number]
    for sketch in sketches:
        torch.testing.assert_close(sketch.cells, cells, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 60), slots=st.integers(1, 9), signed=st.booleans(), seed=st.integers(0, 999))
def test_delete_undoes_insert(count: int, slots: int, signed: bool, seed: int) -> None:
    sketch, at, vectors = filled(count, slots, 6, signed, seed=seed)
    before = [part.clone() for part in sketch.state()]
    more = torch.randn(1, 7, 6, generator=torch.Generator().manual_seed(seed + 1))
    where = places(torch.arange(100, 107)[None], ROWS, slots)
    sketch.insert(where, more)
    assert not torch.equal(sketch.cells, before[0])
    sketch.delete(where, more)
    for part, old in zip(sketch.state(), before, strict=True):
        torch.testing.assert_close(part, old, atol=1e-5, rtol=1e-5)
    sketch.delete(at, vectors)
    for part in sketch.state():
        assert part.abs().max() < 1e-4


def test_alone_in_its_slots_a_vector_comes_back_as_it_was() -> None:
    for signed in (False, True):
        sketch, at, vectors = filled(4, 2000, 8, signed)
        torch.testing.assert_close(sketch.query(at), vectors, atol=0, rtol=0)


# -- estimates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_median_is_torchs(rows: int) -> None:
    vectors = torch.randn(1, 80, 7, generator=torch.Generator().manual_seed(rows))
    at = places(torch.arange(80)[None], rows, 9)
    sketch = CountSketch(1, rows, 9, 7, True, like=vectors)
    sketch.insert(at, vectors)
    size = rows * 9
    picked = torch.stack([sketch.cells[0, own % size] * torch.where(own >= size, -1, 1)[:, None] for own in at[:, 0]])
    torch.testing.assert_close(sketch.query(at)[0], picked.median(0).values, atol=0, rtol=0)
