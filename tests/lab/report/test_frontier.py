"""The frontier: exactly the rows that no other beats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvkeep_lab.report.methods import AXES, NOISE, frontier
from kvkeep_lab.statistics import Estimate
from kvkeep_lab.tasks.base import Metric

MEMORY, SPEED = AXES
FOUND, KL = Metric("m", "found"), Metric("m", "KL", "lower", "number")


def line(cost: float, mean: float, token_s: float | None = None) -> Any:
    return SimpleNamespace(total_bytes=cost * 1e6, token_s=token_s, scores={"m": Estimate(mean, mean, mean, 3)})


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), st.booleans())
def test_no_other_is_cheaper_and_better(rows: list[tuple[int, int]], higher: bool) -> None:
    lines = [line(cost, mean) for cost, mean in rows]
    found = [(one.total_bytes / 1e6, one.scores["m"].mean) for one in frontier(lines, FOUND if higher else KL, MEMORY)]
    sign = 1 if higher else -1
    beaten = {
        (cost, mean)
        for cost, mean in rows
        for other, theirs in rows
        if (other <= cost and sign * theirs > sign * mean) or (other < cost and theirs == mean)
    }
    assert found == sorted({(cost, mean) for cost, mean in rows} - beaten)


def test_rounding_is_no_gain_and_what_has_no_time_is_not_fast() -> None:
    cheap, exact = line(1, 5e-12), line(2, 0.0)
    assert frontier([exact, cheap], KL, MEMORY) == [cheap]
    assert frontier([line(1, 2 * NOISE), exact], KL, MEMORY)[-1] is exact
    timed, untimed = line(1, 0.5, 0.1), line(1, 0.9)
    assert frontier([timed, untimed], FOUND, SPEED) == [timed]
