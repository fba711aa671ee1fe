"""Which rows no other beats in both quality and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep_lab.report.methods import MethodResult
from kvkeep_lab.tasks.base import Metric

NOISE = 1e-6
"""What a mean has to be better by: below lies the rounding of exact methods."""


@dataclass(frozen=True)
class Axis:
    """A cost that quality is compared with. name: in files and tables; of: in a sentence; cost: of a result, in
    ``unit``, None where it was not measured. timed: it compares only within one machine."""

    name: str
    of: str
    unit: str
    cost: Callable[[MethodResult], float | None]
    timed: bool = False


AXES = (
    Axis("memory", "memory", "MB", lambda result: result.total_bytes / 1e6 or None),
    Axis(
        "speed",
        "time a token",
        "ms a token",
        lambda result: None if result.token_s is None else 1e3 * result.token_s,
        timed=True,
    ),
)
"""Memory, and speed."""


def frontier(results: Sequence[MethodResult], metric: Metric, axis: Axis) -> list[MethodResult]:
    """Return the Pareto-optimal results of those with numbers, the cheapest first: each is better than all that cost
    less, by its mean and by more than :data:`NOISE`."""
    found: list[MethodResult] = []
    best = float("-inf")
    priced = [
        (cost, _goodness(result, metric), result) for result in results if (cost := axis.cost(result)) is not None
    ]
    for _, good, result in sorted(priced, key=lambda one: (one[0], -one[1])):
        if good > best + NOISE:
            found.append(result)
            best = good
    return found


def _goodness(result: MethodResult, metric: Metric) -> float:
    mean = result.scores[metric.name].mean
    return mean if metric.better == "higher" else -mean
