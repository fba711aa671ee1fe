"""Estimates that KVReviver does not have: their bias, their variance, their products, and averaged cells."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep_lab.published.sketch_variants import MEDIAN, TalliedSketch

from kvkeep.stores.evicted.sketch import PAGE, places

ROWS = 3


def filled(
    count: int, slots: int, dim: int, signed: bool = True, *, seed: int = 0, lanes: int = 1
) -> tuple[TalliedSketch, torch.Tensor, torch.Tensor]:
    """A sketch of normal vectors, where they are, and the vectors."""
    vectors = torch.randn(lanes, count, dim, generator=torch.Generator().manual_seed(seed))
    at = places(torch.arange(count).expand(lanes, -1), ROWS, slots, seed)
    sketch = TalliedSketch(lanes, ROWS, slots, dim, signed, True, like=vectors)
    sketch.insert(at, vectors)
    return sketch, at, vectors


# -- what estimates are worth -----------------------------------------------------------------------


@pytest.mark.parametrize("by", ["median", "mean"])
def test_signed_estimates_have_no_bias(by: str) -> None:
    """Over many seeds of the hash, the error of each fixed vector averages to nothing; unsigned, it does not."""
    vectors = torch.randn(1, 60, 4, generator=torch.Generator().manual_seed(3)) + 1
    errors: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for seed, signed in itertools.product(range(600), errors):
        at = places(torch.arange(60)[None], ROWS, 12, seed)
        sketch = TalliedSketch(1, ROWS, 12, 4, signed, like=vectors)
        sketch.insert(at, vectors)
        errors[signed].append(sketch.variant(at, by).dense(torch.float32) - vectors)
    biases = {signed: torch.stack(own).mean(0) for signed, own in errors.items()}
    noise = torch.stack(errors[True]).std(0) / math.sqrt(600)
    assert ((biases[True] / noise).abs() < 5).all()
    assert biases[False].mean() > 3  # five others on average, each with a mean of 1


@pytest.mark.parametrize(("by", "factor"), [("median", MEDIAN[3]), ("mean", 1 / 3)])
def test_the_variance_is_a_share_of_the_loads(by: str, factor: float) -> None:
    """Appendix E, Eq. 2: the median of three has 0.448 of the variance of one. The mean of three has a third."""
    load, slots = 100, 20
    sketch, at, vectors = filled(load * slots, slots, 64)
    error = sketch.variant(at, by).dense(torch.float32) - vectors
    assert abs(error.var() / (load * factor) - 1) < 0.08


@settings(max_examples=12, deadline=None)
@given(load=st.sampled_from([2, 6, 20]), slots=st.sampled_from([30, 100]), seed=st.integers(0, 50))
def test_the_chernoff_bound_holds(load: int, slots: int, seed: int) -> None:
    """Appendix E: with N = r b and a insertions, P(x > (1 + delta) 3a/N) <= exp(-delta^2 3a / ((2 + delta) N)) for the
    vectors x in a slot; and the variance of an estimate is above a pi / N with a probability below exp(-a / N)."""
    count, dim, size = load * slots, 200, ROWS * slots
    sketch, at, vectors = filled(count, slots, dim, False, seed=seed)
    assert sketch.counts is not None
    others = sketch.counts.view(-1)[(at % size).flatten()] - 1
    mean = ROWS * count / size
    for delta in (0.5, 1.0, 2.0):
        share = (others > (1 + delta) * mean).float().mean()
        assert share <= math.exp(-(delta**2) * mean / (2 + delta)) + 3 / math.sqrt(count)
    signed, at, vectors = filled(count, slots, dim, seed=seed)
    variances = (signed.query(at) - vectors).square().mean(2)
    assert (variances > count * math.pi / size).float().mean() < math.exp(-count / size)


@pytest.mark.parametrize("by", ["median", "mean"])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("load", [1, 8, 90])
def test_shrunk_estimates_are_the_best_of_all(by: str, signed: bool, load: int) -> None:
    """Vectors about a mean far from zero, as keys are: the shrunk estimate errs less than the centred one, and less
    than the mean of all, which errs by the whole variance."""
    slots = 16
    vectors = torch.randn(1, load * slots, 128, generator=torch.Generator().manual_seed(load)) + 3
    at = places(torch.arange(load * slots)[None], ROWS, slots)
    sketch = TalliedSketch(1, ROWS, slots, 128, signed, True, like=vectors)
    sketch.insert(at, vectors)
    held = torch.tensor([load * slots])

    def error(**options: object) -> float:
        found = sketch.variant(at, by, **options).dense(torch.float32)  # type: ignore[arg-type]
        return float((found - vectors).square().mean())

    plain, centred, shrunk = error(), error(count=held), error(count=held, shrink=True)
    assert shrunk < min(plain, centred) and shrunk < 1.005
    if load >= 8:
        assert centred < plain and shrunk < 1
    if load > 3:  # deleting an estimate leaves more behind than the vector itself was
        assert centred > 1


# -- products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["median", "mean"])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_products_are_those_with_what_is_written_out(by: str, signed: bool, held: bool) -> None:
    count, lanes = PAGE + 50, 2
    sketch, at, _ = filled(count, 20, 6, signed, lanes=lanes)
    whole = sketch.variant(at, by, torch.full((lanes,), count) if held else None, shrink=held)
    generator = torch.Generator().manual_seed(1)
    query, weights = (torch.randn(lanes, 4, size, generator=generator) for size in (6, count))
    for estimates, own in ((whole, weights), (whole.part(10, 300), weights[:, :, 10:300])):
        dense = estimates.dense(torch.float32)
        assert estimates.shape == (lanes, 1, *dense.shape[1:])
        torch.testing.assert_close(estimates.scores(query), query @ dense.transpose(1, 2), atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(estimates.mix(own), own @ dense, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("by", ["median", "mean"])
def test_averaged_estimates_are_of_the_means_of_their_cells(by: str) -> None:
    """Against loops, after vectors went again: no estimate is longer than the vectors; sums grow with the load."""
    count, slots, gone = 60, 4, 20
    vectors = torch.randn(1, count, 5, generator=torch.Generator().manual_seed(2)) + 1
    at = places(torch.arange(count)[None], ROWS, slots)
    sketch = TalliedSketch(1, ROWS, slots, 5, False, averaged=True, like=vectors)
    sketch.insert(at, vectors)
    sketch.delete(at[:, :, :gone], vectors[:, :gone])
    kept, size = at[:, 0, gone:] % (ROWS * slots), ROWS * slots
    means = torch.zeros(size, 5)
    for cell in range(size):
        if len(members := [number for row in kept for number, own in enumerate(row.tolist()) if own == cell]):
            means[cell] = torch.stack([vectors[0, gone + number] for number in members]).mean(0)
    picked = torch.stack([means[own] for own in kept])
    expected = picked.median(0).values if by == "median" else picked.mean(0)
    found = sketch.variant(at[:, :, gone:], by).dense(torch.float32)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
    assert found.norm(dim=2).max() < vectors.norm(dim=2).max() < sketch.cells.norm(dim=2).max()
