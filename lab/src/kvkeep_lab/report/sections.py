"""What stores hold of an experiment: a line for each method and budget, with means and intervals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from kvkeep_lab.experiment import Experiment, PaperValue
from kvkeep_lab.intervals import Estimate, estimate
from kvkeep_lab.report.groups import Group, grouped
from kvkeep_lab.store import Row, Store
from kvkeep_lab.tasks.base import Point

Place = tuple[str, int]
"""A point, as JSON, and a seed: methods share its prompts."""

Samples = dict[Place, dict[str, list[float]]]
"""Each metric's numbers, in the samples' order, by place."""


@dataclass(frozen=True, eq=False)
class Line:
    """One method at one budget, over all points, seeds and samples.

    scores: by metric. beside: the difference from the baseline, sample by sample. held_bytes: mean over the cells of
    the bytes of entries that attention reads; checkpoint_bytes: of checkpoints, wherever they are. prefill_s, token_s:
    means of seconds of a prompt, and of each token after the first. entries: the fewest and the most of a full layer.
    cells: how many were measured, of how many. at: each point's mean of each metric. error: why a cell is missing.
    samples: the numbers themselves.
    """

    method: str
    budget: str | None
    cells: int
    of: int
    exactness: str = ""
    entries: tuple[int, int] | None = None
    scores: dict[str, Estimate] | None = None
    beside: dict[str, Estimate] | None = None
    held_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    prefill_s: float = 0.0
    token_s: float | None = None
    at: tuple[tuple[Point, dict[str, float]], ...] = ()
    paper: tuple[PaperValue, ...] = ()
    error: str = ""
    samples: Samples = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """Method and budget as a person reads them."""
        return self.method if self.budget is None else f"{self.method} at {self.budget}"

    @property
    def total_bytes(self) -> float:
        """Bytes of entries and of checkpoints."""
        return self.held_bytes + self.checkpoint_bytes

    def values(self, metric: str) -> list[float]:
        """Return all numbers of a metric."""
        return [value for scores in self.samples.values() for value in scores[metric]]

    def minus(self, other: Samples, metric: str) -> list[float]:
        """Return the differences from another's samples, one by one, wherever both were measured."""
        return [
            mine - theirs
            for place, scores in self.samples.items()
            if place in other
            for mine, theirs in zip(scores[metric], other[place][metric], strict=True)
        ]


@dataclass(frozen=True)
class Section(Group[Experiment, Row]):
    """An experiment of methods and budgets, and its lines."""

    lines: tuple[Line, ...]

    @property
    def measured(self) -> list[Line]:
        """The lines that have numbers."""
        return [line for line in self.lines if line.scores]

    @property
    def prompts(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest prompt."""
        tokens = [count for row in self.records for count in row.prompt_tokens] or [0]
        return min(tokens), max(tokens)

    @property
    def comparable(self) -> bool:
        """Whether all of it was measured by one version on one machine, so that seconds may be compared."""
        return len(self.versions) == 1 and len(self.machines) == 1

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the single samples as plain types."""
        lines: list[dict[str, Any]] = []
        for line in self.lines:
            plain = {key: value for key, value in asdict(line).items() if key != "samples"}
            lines.append({**plain, "paper": [value.model_dump(mode="json") for value in line.paper]})
        names = ("setting", "model", "versions", "machines", "prompts")
        own = {name: getattr(self, name) for name in names}
        return {**own, "lines": lines, "experiment": self.experiment.model_dump(mode="json")}


def sections(stores: Sequence[Store]) -> list[Section]:
    """Return what ``stores`` hold (already read) of tasks."""
    return [_section(group) for group in grouped(stores, Experiment, Row)]


def _section(group: Group[Experiment, Row]) -> Section:
    experiment = group.experiment
    ways: dict[tuple[str, str | None], list[Row]] = {way: [] for way in experiment.ways()}
    for row in group.records:
        ways.setdefault((row.method, row.budget), []).append(row)
    first = next((mine for (method, _), mine in ways.items() if method == experiment.baseline and mine), [])
    baseline = {_place(row): row.scores for row in first if row.status == "done"}
    lines = tuple(_line(experiment, *way, mine, baseline) for way, mine in ways.items() if mine)
    return Section(experiment, group.setting, group.model, group.records, lines)


def _line(experiment: Experiment, method: str, budget: str | None, rows: Sequence[Row], baseline: Samples) -> Line:
    done = [row for row in rows if row.status == "done"]
    expected = max(len(rows), len(experiment.task.points()) * len(experiment.seeds))
    values = () if experiment.paper is None else experiment.paper.values
    paper = tuple(value for value in values if value.method == method and value.budget in (None, budget))
    error = next((row.error for row in rows if row.status == "failed"), "")
    bare = Line(
        method,
        budget,
        len(done),
        expected,
        paper=paper,
        error=error,
        samples={_place(row): row.scores for row in done},
    )
    if not done:
        return bare
    metrics = [metric.name for metric in experiment.task.metrics]
    pairs = {} if method == experiment.baseline else {name: bare.minus(baseline, name) for name in metrics}
    steps = [value for row in done for value in row.token_s if value is not None]
    entries = [row.entries for row in done if row.entries is not None]
    return replace(
        bare,
        exactness=done[-1].exactness,
        entries=(min(entries), max(entries)) if entries else None,
        scores={name: estimate(found) for name in metrics if (found := bare.values(name))},  # some are of few samples
        beside={name: estimate(values) for name, values in pairs.items() if values},
        held_bytes=fmean(row.held_bytes for row in done),
        checkpoint_bytes=fmean(sum(row.memory.get("checkpoint_bytes", {}).values()) for row in done),
        prefill_s=fmean(value for row in done for value in row.prefill_s),
        token_s=fmean(steps) if steps else None,
        at=tuple(_at(done)),
    )


def _at(done: Sequence[Row]) -> Iterator[tuple[Point, dict[str, float]]]:
    points: dict[str, tuple[Point, list[Row]]] = {}
    for row in done:
        points.setdefault(json.dumps(row.point, sort_keys=True), (row.point, []))[1].append(row)
    for point, rows in points.values():
        found = {name: [value for row in rows for value in row.scores[name]] for name in rows[0].scores}
        yield point, {name: fmean(values) for name, values in found.items() if values}


def places(section: Section, axis: str) -> list[float | str]:
    """Return the values of an axis that were measured: sizes in order, names as the task lists them."""
    found = {point[axis] for line in section.measured for point, _ in line.at}
    listed = getattr(section.experiment.task, axis)
    names = sorted(
        (value for value in found if isinstance(value, str)),
        key=lambda name: (listed.index(name) if name in listed else len(listed), name),
    )
    return [*sorted(value for value in found if not isinstance(value, str)), *names]


def _place(row: Row) -> Place:
    return json.dumps(row.point, sort_keys=True), row.seed
