"""Chapters of experiments that measure a task with methods at budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.cell import named
from kvkeep_lab.experiment import Experiment
from kvkeep_lab.paper import Claim, PaperValue
from kvkeep_lab.reading import takes, takes_budget
from kvkeep_lab.report import formatting as text
from kvkeep_lab.report.chapter import Picture
from kvkeep_lab.report.figures import draw_depths, draw_frontier, draw_maps, draw_quality
from kvkeep_lab.report.formatting import code, listed, number, titled, ways
from kvkeep_lab.report.group import Group
from kvkeep_lab.report.methods import AXES, MethodResult, frontier, method_results, place_of, with_same_places
from kvkeep_lab.report.verdicts import ClaimCase
from kvkeep_lab.statistics import RESAMPLES
from kvkeep_lab.store import TaskRecord
from kvkeep_lab.tables import markdown, megabytes, milliseconds
from kvkeep_lab.tasks.base import Metric, Task


@dataclass(frozen=True)
class TaskGroup(Group):
    """The records of an experiment with methods and budgets."""

    experiment: Experiment
    records: Sequence[TaskRecord]

    @property
    def task(self) -> Task:
        return self.experiment.task

    @cached_property
    def results(self) -> tuple[MethodResult, ...]:
        """The result of each method at each budget with records."""
        return method_results(self.experiment, self.model, self.records)

    @property
    def measured(self) -> list[MethodResult]:
        """The results that have the task's first metric."""
        return [result for result in self.results if self.task.metrics[0].name in result.scores]

    @property
    def same_samples(self) -> TaskGroup:
        """The rows that can be compared, and the samples that all of them have."""
        results, places = with_same_places(self.measured)
        ways = {(result.method, result.budget) for result in results}
        records = [one for one in self.records if (one.method, one.budget) in ways and place_of(one) in places]
        return replace(self, records=records)

    @property
    def prompts(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest prompt."""
        tokens = [count for record in self.records for count in record.prompt_tokens] or [0]
        return min(tokens), max(tokens)

    @property
    def comparable(self) -> bool:
        """Whether one version measured all cells on one machine, so that seconds are comparable."""
        return len(self.versions) == 1 and len(self.machines) == 1

    def places(self, axis: str) -> list[float | str]:
        """Return the measured values of an axis: sizes in order, names in the order of the task."""
        found = {point[axis] for result in self.measured for point, _ in result.at}
        known = getattr(self.task, axis)
        names = sorted(
            (value for value in found if isinstance(value, str)),
            key=lambda name: (known.index(name) if name in known else len(known), name),
        )
        return [*sorted(value for value in found if not isinstance(value, str)), *names]

    def as_dict(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("setting", "model", "versions", "machines", "prompts")}
        lines = [result.as_dict() for result in self.results]
        return {**facts, "lines": lines, "experiment": self.experiment.model_dump(mode="json")}

    @property
    def ours(self) -> str:
        shortest, longest = self.prompts
        prompts = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        seeds = len(self.experiment.seeds)
        counts = {"sample": self.task.samples, "point": len(self.task.points()), "seed": seeds}
        row = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items())
        scored = [result.scores.values() for result in self.measured if result.scores]
        found = sorted({max(one.n for one in scores) for scores in scored}) or [0]
        planned = f" ({row})" if found == [math.prod(counts.values())] else ""
        rows = f"N = {' to '.join(map(str, dict.fromkeys([found[0], found[-1]])))} a row{planned}"
        return f"{self.model}, {self.dtypes}, prompts of {prompts} tokens, {rows}"

    def blocks(self) -> Iterator[str | Picture]:
        if self.measured:
            yield _table(self)
            yield self._legend
            yield Picture(f"{self.name}-quality", f"{self.title}, quality", partial(draw_quality, self))
            if self.task.mapped:
                yield Picture(f"{self.name}-map", f"{self.title}, by point", partial(draw_maps, self))
            if any(record.depths for record in self.records):
                yield Picture(f"{self.name}-depths", f"{self.title}, by depth", partial(draw_depths, self))
            yield from _by_name(self)
            yield from _frontiers(self)
        yield from self.measuring(self.task.protocol, *self._tuned())

    @property
    def _legend(self) -> str:
        """Return the explanation of the table's cells."""
        said = f"In brackets: the range of 95 % of {RESAMPLES:,} bootstrap means over samples."
        if any(result.share is not None for result in self.measured):
            said += (
                " held: bytes of the entries that attention reads, and their share of the full cache's bytes in "
                "bfloat16, without and with the method's bookkeeping."
            )
        if self._relative:
            said += f" vs {self.experiment.baseline}: mean difference from it, sample by sample."
        if not self.comparable:
            said += (
                " The rows come from different versions or machines (named below), so their times cannot be compared."
            )
        return said

    def _tuned(self) -> Iterator[str]:
        """Yield the chosen parameters of tuned methods, and the passages of the choice."""
        tune, chosen = self.experiment.tune, self.experiment.chosen.get(self.model, {})
        if tune is not None and chosen:
            size = f"{tune.samples} other passage{'s' if tune.samples > 1 else ''} of {tune.length:,} tokens"
            found = "; ".join(
                f"{code(name)} ({len(tune.tried([name]))} tried): "
                + ways((code(at[name]), budget) for budget, at in chosen.items() if name in at)
                for name in tune.candidates
            )
            yield f"Parameters with the least mean KL (teacher-forced) on {size}: {found}."

    @property
    def _relative(self) -> list[Metric]:
        return [metric for metric in self.task.metrics if metric.name in self.task.relative]

    def missing(self) -> Iterator[str]:
        reasons: dict[str, list[MethodResult]] = {}
        for result in self.results:
            if result.cells < result.of:
                reasons.setdefault(result.error, []).append(result)
        for error, results in reasons.items():
            cells = {f"{result.cells} of {result.of} cells" for result in results}
            names = ways((code(result.method), result.budget) for result in results)
            yield f"{names}: {' or '.join(sorted(cells))} measured{f': {text.escaped(error)}' if error else ' so far.'}"
        there = {(result.method, result.budget) for result in self.results}
        if missing := [way for way in self.experiment.ways(self.model) if way not in there]:
            yield f"Not measured yet: {ways((code(method), budget) for method, budget in missing)}."

    def cases(self, claim: Claim) -> list[ClaimCase]:
        assert claim.metric is not None
        metric = self.metric(claim.metric)
        return [
            self._case(metric, method, budget, other)
            for method in claim.methods
            for budget in (claim.budgets or self.experiment.budgets if takes_budget(method) else (None,))
            for other in claim.than or (None,)
        ]

    def _case(self, metric: Metric, method: str, budget: str | None, other: str | None) -> ClaimCase:
        """Return one case of a claim: a method, or its difference from ``other`` at the same budget (or without one).
        Without ``other``, the baseline decides whether the worst possible value of a method shows anything."""
        rows = {(result.method, result.budget): result for result in self.measured}
        method, name = (
            self.experiment.choice(one, self.model, budget) for one in (method, other or self.experiment.baseline)
        )
        mine, beside = rows.get((method, budget)), rows.get((name, budget)) or rows.get((name, None))
        if mine is None or (other is not None and beside is None):
            values: list[float] = []
        elif other is None or beside is None:
            values = mine.values(metric.name)
        else:
            values = mine.minus(beside.samples, metric.name)
        sides = [] if mine is None or beside is None else [*mine.values(metric.name), *beside.values(metric.name)]
        floored = bool(values and sides) and all(value == metric.floor for value in sides)
        label = code(method) if other is None else f"{code(method)} less {code(name)}"
        return ClaimCase(label, budget, values, floored=floored)

    def undecided(self) -> Iterator[str]:
        """Yield the claims without a metric, and the paper's numbers of methods that kvkeep lacks."""
        yield from super().undecided()
        for value in () if self.experiment.paper is None else self.experiment.paper.values:
            if not is_ours(value.method):
                who = " at ".join(part for part in (value.method, value.budget) if part)
                note = f" ({value.note})" if value.note else ""
                yield f"The paper's number: {f'{who}: ' if who else ''}{self.paper_value(value)}{note}."

    def paper_value(self, value: PaperValue) -> str:
        """Return one of the paper's numbers with its metric."""
        metric = self.metric(value.metric)
        return f"{metric.label} {number(metric, value.value)}"


def is_ours(method: str) -> bool:
    """Return whether kvkeep has a method of a paper; False for ""."""
    try:
        takes(method)
    except UsageError:
        return False
    return bool(method)


def _table(group: TaskGroup) -> str:
    """Return the table of all rows: metrics, the paper's numbers, bytes and seconds."""
    baseline, relative = group.experiment.baseline, group._relative
    paper = any(result.paper for result in group.results)
    checkpoints = any(result.checkpoint_bytes for result in group.measured)
    headings = ["method", "budget", "entries"]
    metrics = [one for one in group.task.metrics if any(one.name in result.scores for result in group.measured)]
    for metric in metrics:
        headings += [titled(metric), *([f"vs {baseline}"] if metric in relative else [])]
    headings += [*(["paper"] if paper else []), "held", *(["checkpoints"] if checkpoints else []), "prefill", "token"]
    rows = []
    for result in group.measured:
        entries = "all" if result.entries is None else "-".join(f"{n:,}" for n in dict.fromkeys(result.entries))
        cells = [code(result.method), result.budget or "-", entries]
        for metric in metrics:
            name = metric.name
            cells.append(text.estimate_text(metric, result.scores[name]) if name in result.scores else "-")
            if metric in relative:
                cells.append(text.difference_text(metric, result.beside[name]) if name in result.beside else "-")
        cells += [", ".join(map(group.paper_value, result.paper)) or "-"] if paper else []
        shares = [share for share in (result.share, result.booked_share) if share is not None]
        share = f" ({', '.join(f'{100 * share:.3g}' for share in shares)} %)" if shares else ""
        cells.append(f"{megabytes(result.held_bytes)}{share}")
        cells += [megabytes(result.checkpoint_bytes) if result.checkpoint_bytes else "-"] if checkpoints else []
        read = "-" if result.prefill_s is None else f"{result.prefill_s:.2f} s"
        rows.append([*cells, read, milliseconds(result.token_s)])
    return markdown(headings, rows, left=2)


def _by_name(group: TaskGroup) -> Iterator[str]:
    """Yield a table of the first metric for each axis of names: a column per name, as the mean over the other axes."""
    metric = group.task.metrics[0]
    for axis in group.task.axes:
        columns = group.places(axis)
        if any(isinstance(value, str) for value in columns):
            rows = []
            for result in group.measured:
                cells = [code(result.method), result.budget or "-"]
                for value in columns:
                    means = [scores[metric.name] for point, scores in result.at if point[axis] == value]
                    cells.append(number(metric, fmean(means)) if means else "-")
                rows.append(cells)
            yield markdown([titled(metric), "budget", *(code(named(value)) for value in columns)], rows, left=2)


def _frontiers(group: TaskGroup) -> Iterator[str | Picture]:
    """Yield the rows on a frontier as a table, and a figure of each frontier. Times that are not comparable have no
    frontier."""
    part, metric = group.same_samples, group.task.metrics[0]
    rows = len(part.measured)
    used, cells = (sum(len(row.samples) for row in one.measured) for one in (part, group))
    axes = [axis for axis in AXES if any(axis.cost(result) is not None for result in part.measured)]
    axes = [axis for axis in axes if part.comparable or not axis.timed]
    of: dict[MethodResult, list[str]] = {}
    for axis in axes:
        for result in frontier(part.measured, metric, axis):
            of.setdefault(result, []).append(axis.name)
    yield "### The frontier"
    yield (
        f"A row is on a frontier if no other row has both less {' or '.join(axis.of for axis in axes)} and a "
        f"better mean ({metric.label}). Memory counts entries and checkpoints, wherever they are stored."
        + (" Times depend on the load of the machine while a row was measured." if part.comparable else "")
        + (
            f" {rows} of {len(group.measured)} rows are compared, on the samples that all of them have "
            f"(N = {part.measured[0].scores[metric.name].n}), so their means may differ from those above."
            if used < cells
            else ""
        )
    )
    lines = []
    for result in sorted(of, key=lambda result: (result.total_bytes, part.measured.index(result))):
        quality = text.estimate_text(metric, result.scores[metric.name])
        cost = megabytes(result.total_bytes), milliseconds(result.token_s)
        lines.append([code(result.method), result.budget or "-", quality, *cost, listed(of[result])])
    yield markdown(["on the frontier", "budget", titled(metric), "memory", "token", "of"], lines, left=2, right=3)
    for axis in axes:
        title = f"{part.title}, quality against {axis.of}"
        yield Picture(f"{part.name}-frontier-{axis.name}", title, partial(draw_frontier, part, axis))
