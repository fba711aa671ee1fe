"""The results of each method at each budget: means and intervals over all points, seeds and samples, and the Pareto
frontier of quality and cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from kvkeep_lab.cell import Point
from kvkeep_lab.experiment import Experiment
from kvkeep_lab.paper import PaperValue
from kvkeep_lab.statistics import Estimate, estimate
from kvkeep_lab.store import TaskRecord
from kvkeep_lab.tasks.base import Metric

Place = tuple[str, int]
"""A point as JSON, and a seed. Methods have the same prompts at the same place."""

Samples = dict[Place, dict[str, list[float]]]
"""The numbers of each metric, in the order of samples, by place."""

NOISE = 1e-6
"""Minimum difference of a better mean; smaller differences are rounding of exact methods."""


@dataclass(frozen=True, eq=False)
class MethodResult:
    """One method at one budget."""

    method: str
    budget: str | None
    cells: int
    """Number of measured cells."""
    of: int
    """Number of planned cells."""
    exactness: str = ""
    entries: tuple[int, int] | None = None
    """Minimum and maximum entries of a full layer."""
    scores: dict[str, Estimate] = field(default_factory=dict)
    """Estimates by metric."""
    beside: dict[str, Estimate] = field(default_factory=dict)
    """Estimated differences from the baseline, sample by sample, by metric."""
    held_bytes: float = 0.0
    """Mean bytes over the cells of entries that attention reads."""
    share: float | None = None
    """These bytes relative to an unbounded bfloat16 cache, independent of the model's dtype; None if records lack
    them."""
    booked_share: float | None = None
    """The share of these bytes and of the method's bookkeeping together."""
    checkpoint_bytes: float = 0.0
    """Mean bytes of checkpoints in all places."""
    prefill_s: float | None = None
    """Mean seconds of a prompt."""
    token_s: float | None = None
    """Mean seconds of each token after the first."""
    at: tuple[tuple[Point, dict[str, float]], ...] = ()
    """Mean of each metric at each point."""
    paper: tuple[PaperValue, ...] = ()
    error: str = ""
    """Reason for a missing cell."""
    samples: Samples = field(default_factory=dict, repr=False)
    """The numbers of each sample."""

    @property
    def label(self) -> str:
        """Method and budget as text for people."""
        return self.method if self.budget is None else f"{self.method} at {self.budget}"

    @property
    def total_bytes(self) -> float:
        """Bytes of entries and of checkpoints."""
        return self.held_bytes + self.checkpoint_bytes

    def values(self, metric: str) -> list[float]:
        """Return all numbers of a metric. Records of earlier versions of kvkeep may have none."""
        return [value for scores in self.samples.values() for value in scores.get(metric, ())]

    def minus(self, other: Samples, metric: str) -> list[float]:
        """Return the differences from another method's samples, one by one, for samples that both have."""
        return [
            mine - theirs
            for place, scores in self.samples.items()
            if place in other and scores.get(metric) and other[place].get(metric)
            for mine, theirs in zip(scores[metric], other[place][metric], strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields except ``samples`` as plain types; scores are None without measurements."""
        plain = {key: value for key, value in asdict(self).items() if key != "samples"}
        plain |= {} if self.scores else {"scores": None, "beside": None}
        return {**plain, "paper": [value.model_dump(mode="json") for value in self.paper]}


def method_results(experiment: Experiment, model: str, records: Sequence[TaskRecord]) -> tuple[MethodResult, ...]:
    """Return the result of each method and budget from ``records`` of ``model``, in the experiment's order."""
    of: dict[tuple[str, str | None], list[TaskRecord]] = {way: [] for way in experiment.ways(model)}
    for record in records:
        of.setdefault((record.method, record.budget), []).append(record)
    baseline = {
        budget: _samples([record for record in mine if record.status == "done"])
        for (method, budget), mine in of.items()
        if method == experiment.baseline
    }
    return tuple(
        _result(experiment, *way, mine, baseline.get(way[1], baseline.get(None, {})))
        for way, mine in of.items()
        if mine
    )


def _result(
    experiment: Experiment, method: str, budget: str | None, records: Sequence[TaskRecord], baseline: Samples
) -> MethodResult:
    done = [record for record in records if record.status == "done"]
    values = () if experiment.paper is None else experiment.paper.values
    bare = MethodResult(
        method,
        budget,
        cells=len(done),
        of=max(len(records), len(experiment.task.points()) * len(experiment.seeds)),
        paper=tuple(value for value in values if value.method == method and value.budget in (None, budget)),
        error=next((record.error for record in records if record.status == "failed"), ""),
        samples=_samples(done),
    )
    if not done:
        return bare
    metrics = [metric.name for metric in experiment.task.metrics]
    pairs = {} if method == experiment.baseline else {name: bare.minus(baseline, name) for name in metrics}
    shares = [record.held_bytes / record.whole_bytes for record in done if record.whole_bytes]
    booked = [
        (record.held_bytes + record.bookkeeping_bytes) / record.whole_bytes for record in done if record.whole_bytes
    ]
    prefills = [value for record in done for value in record.prefill_s]
    steps = [value for record in done for value in record.token_s if value is not None]
    entries = [record.entries for record in done if record.entries is not None]
    return replace(
        bare,
        exactness=done[-1].exactness,
        entries=(min(entries), max(entries)) if entries else None,
        scores={name: estimate(found) for name in metrics if (found := bare.values(name))},  # some have few samples
        beside={name: estimate(values) for name, values in pairs.items() if values},
        held_bytes=fmean(record.held_bytes for record in done),
        share=fmean(shares) if shares else None,
        booked_share=fmean(booked) if booked else None,
        checkpoint_bytes=fmean(record.checkpoint_bytes for record in done),
        prefill_s=fmean(prefills) if prefills else None,
        token_s=fmean(steps) if steps else None,
        at=tuple(_at(done)),
    )


def _at(done: Sequence[TaskRecord]) -> Iterator[tuple[Point, dict[str, float]]]:
    points: dict[str, list[TaskRecord]] = {}
    for record in done:
        points.setdefault(json.dumps(record.point, sort_keys=True), []).append(record)
    for records in points.values():
        names = dict.fromkeys(name for record in records for name in record.scores)
        found = {name: [value for record in records for value in record.scores.get(name, ())] for name in names}
        yield records[0].point, {name: fmean(values) for name, values in found.items() if values}


def _samples(done: Sequence[TaskRecord]) -> Samples:
    return {place_of(record): record.scores for record in done}


def place_of(record: TaskRecord) -> Place:
    """Return a record's place."""
    return json.dumps(record.point, sort_keys=True), record.seed


def with_same_places(results: Sequence[MethodResult]) -> tuple[list[MethodResult], set[Place]]:
    """Return the results that have all places of one of them, and these places: of the one for which results times
    places are most. Means of other places are not compared, because samples there may be easier."""
    found = list[MethodResult](), set[Place]()
    for places in (set(result.samples) for result in results):
        mine = [result for result in results if places <= result.samples.keys()]
        if len(mine) * len(places) > len(found[0]) * len(found[1]):
            found = mine, places
    return found


@dataclass(frozen=True)
class Axis:
    """A cost with which quality is compared."""

    name: str
    """Name in files and tables."""
    of: str
    """Name in a sentence."""
    unit: str
    cost: Callable[[MethodResult], float | None]
    """Returns the cost of a result in ``unit``; None if it was not measured."""
    timed: bool = False
    """Whether the cost is comparable only on one machine."""


AXES = (
    Axis("memory", "memory", "MB", lambda result: result.total_bytes / 1e6 or None),
    Axis("speed", "time a token", "ms a token", lambda result: result.token_s and 1e3 * result.token_s, timed=True),
)
"""The costs of the report: memory and speed."""


def frontier(results: Sequence[MethodResult], metric: Metric, axis: Axis) -> list[MethodResult]:
    """Return the Pareto-optimal results of those with numbers, the cheapest first. The mean of each is better by more
    than :data:`NOISE` than that of every cheaper result."""
    found, best, sign = list[MethodResult](), float("-inf"), 1 if metric.better == "higher" else -1
    priced = [
        (cost, -sign * result.scores[metric.name].mean, result)
        for result in results
        if (cost := axis.cost(result)) is not None
    ]
    for _, badness, result in sorted(priced, key=lambda one: one[:2]):
        if -badness > best + NOISE:
            found.append(result)
            best = -badness
    return found
