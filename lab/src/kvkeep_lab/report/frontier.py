"""Which rows no other beats in both quality and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep_lab.report.sections import Line
from kvkeep_lab.tasks.base import Metric

NOISE = 1e-6
"""What a mean has to be better by: below lies the rounding of exact methods."""


@dataclass(frozen=True)
class Axis:
    """What quality is held against. name: of files and in tables; of: in a sentence; cost: of a line, in ``unit``; None
    where it was not measured. timed: it compares only within one machine."""

    name: str
    of: str
    unit: str
    cost: Callable[[Line], float | None]
    timed: bool = False


AXES = (
    Axis("memory", "memory", "MB", lambda line: line.total_bytes / 1e6 or None),
    Axis(
        "speed",
        "time a token",
        "ms a token",
        lambda line: None if line.token_s is None else 1e3 * line.token_s,
        timed=True,
    ),
)
"""Memory, and speed."""


def frontier(lines: Sequence[Line], metric: Metric, axis: Axis) -> list[Line]:
    """Return the Pareto-optimal lines of those with numbers, the cheapest first: each is better than all that cost
    less, by its mean and by more than :data:`NOISE`."""
    found: list[Line] = []
    best = float("-inf")
    priced = [(cost, _goodness(line, metric), line) for line in lines if (cost := axis.cost(line)) is not None]
    for _, good, line in sorted(priced, key=lambda one: (one[0], -one[1])):
        if good > best + NOISE:
            found.append(line)
            best = good
    return found


def _goodness(line: Line, metric: Metric) -> float:
    assert line.scores is not None
    mean = line.scores[metric.name].mean
    return mean if metric.better == "higher" else -mean
