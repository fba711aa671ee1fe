"""Codes have smaller errors than sketches of the same bytes (docs/results/kvreviver.md)."""

from __future__ import annotations

import math

import pytest
import torch
from kvkeep_lab.published.sketch_variants import TalliedSketch
from kvkeep_lab.studies.sketch_error import ROWS, coded_error
from torch import Tensor

from kvkeep.stores.evicted.sketch import places

COUNT, DIM = 256, 64


def normal(seed: int = 0, count: int = COUNT, dim: int = DIM) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sums(slots: int, kind: str) -> Tensor:
    """What is added up in each slot, (slots, n)."""
    draw = torch.Generator().manual_seed(9)
    if kind == "dense":
        return torch.randn(slots, COUNT, generator=draw, dtype=torch.float64)
    if kind == "kept":
        return torch.eye(COUNT, dtype=torch.float64)[torch.randperm(COUNT, generator=draw)[:slots]]
    at = torch.randint(slots, (COUNT,), generator=draw)  # hashed, with a sign
    sign = torch.randint(2, (COUNT,), generator=draw).double() * 2 - 1
    return torch.zeros(slots, COUNT, dtype=torch.float64).index_put((at, torch.arange(COUNT)), sign)


@pytest.mark.parametrize("kind", ["dense", "kept", "hashed"])
@pytest.mark.parametrize("slots", [8, 64, 200])
def test_a_linear_sketch_loses_at_least_its_missing_rank(kind: str, slots: int) -> None:
    sketch = sums(slots, kind)
    best = torch.linalg.pinv(sketch)  # of all decoders the one whose product with the sketch is nearest to 1
    away = float((torch.eye(COUNT, dtype=torch.float64) - best @ sketch).square().sum()) / COUNT
    assert away >= 1 - slots / COUNT - 1e-9
    if kind != "hashed":  # of which some slots are empty
        assert away == pytest.approx(1 - slots / COUNT)
    measured = [float((x - best @ (sketch @ x)).square().mean()) for x in map(normal, range(20))]
    assert sum(measured) / 20 == pytest.approx(away, rel=0.05, abs=0.01)
    other = best + 0.05 * torch.randn(best.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert float((torch.eye(COUNT, dtype=torch.float64) - other @ sketch).square().sum()) / COUNT > away


@pytest.mark.parametrize("slots", [4, 12, 40])
def test_median_decoding_is_above_the_bound_and_codes_are_below(slots: int) -> None:
    vectors = normal(dim=DIM).float()[None].expand(2, -1, -1).contiguous()
    at = places(torch.arange(COUNT).expand(2, -1), ROWS, slots)
    sketch = TalliedSketch(2, ROWS, slots, DIM, True, True, like=vectors)
    sketch.insert(at, vectors)
    least, share = 1 - ROWS * slots / COUNT, ROWS * slots / COUNT
    for by in ("median", "mean"):
        assert float((sketch.variant(at, by).dense(torch.float32) - vectors).square().mean()) > least
    assert coded_error(vectors, share) < least


def test_the_error_of_a_code_is_at_most_half_a_step() -> None:
    for scattered in (normal(), normal().exp(), normal().tanh(), normal() ** 3):
        for share, bits in ((3 / 16, 2), (5 / 16, 4), (9 / 16, 8)):
            vectors = scattered.float()[None]
            groups = vectors[0].unflatten(0, (-1, 32))
            step = (groups.amax(1) - groups.amin(1)) / (2**bits - 1)
            bound = float((step / 2).square().mean() / vectors.square().mean())
            assert 0 < coded_error(vectors, share) <= bound * 1.02 + 1e-6  # scale and offset are rounded to 16 bits
            assert coded_error(vectors, 1.0) == coded_error(vectors, 9 / 16)


def test_a_size_between_two_code_widths_mixes_both() -> None:
    vectors = normal(count=320).float()[None]
    coarse, fine, size = (coded_error(vectors[:, part], share) for part, share in
                          ((slice(160, None), 3 / 16), (slice(160), 5 / 16), (slice(None), 0.0)))  # fmt: skip
    first, second = (float(vectors[:, part].square().sum()) for part in (slice(160), slice(160, None)))
    assert coded_error(vectors, 4 / 16) == pytest.approx((fine * first + coarse * second) / (first + second))
    assert size == 1  # without room all is lost


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_one_bit_signs_gain_ten_times_what_slots_gain(share: float) -> None:
    """With less than a bit an element: some elements keep a sign and the mean size, the others are 0."""
    values = normal(count=4096).flatten()
    kept = int(share * len(values))
    read = torch.zeros_like(values)
    read[:kept] = values[:kept].sign() * math.sqrt(2 / math.pi)
    error = float((values - read).square().mean())
    assert error == pytest.approx(1 - share * 2 / math.pi, abs=0.01) and error < 1 - share / 16
