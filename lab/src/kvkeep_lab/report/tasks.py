"""Chapters of experiments that measure a task with methods at budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.experiment import Experiment
from kvkeep_lab.paper import Claim, PaperValue
from kvkeep_lab.reading import takes
from kvkeep_lab.report import formatting as text
from kvkeep_lab.report.chapter import Picture, Verdict
from kvkeep_lab.report.figures import draw_frontier, draw_maps, draw_quality
from kvkeep_lab.report.formatting import code, listed, number, table, titled, ways
from kvkeep_lab.report.group import Group
from kvkeep_lab.report.methods import AXES, MethodResult, frontier, method_results
from kvkeep_lab.report.verdicts import ClaimCase
from kvkeep_lab.statistics import RESAMPLES
from kvkeep_lab.store import TaskRecord
from kvkeep_lab.tasks.base import Metric, Task, named


@dataclass(frozen=True)
class TaskGroup(Group):
    """An experiment of methods and budgets."""

    experiment: Experiment
    records: Sequence[TaskRecord]

    @property
    def task(self) -> Task:
        """The experiment's."""
        return self.experiment.task

    @cached_property
    def results(self) -> tuple[MethodResult, ...]:
        """Each method at each budget, as far as there are records."""
        return method_results(self.experiment, self.records)

    @property
    def measured(self) -> list[MethodResult]:
        """The results that have numbers."""
        return [result for result in self.results if result.scores]

    @property
    def prompts(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest prompt."""
        tokens = [count for record in self.records for count in record.prompt_tokens] or [0]
        return min(tokens), max(tokens)

    @property
    def comparable(self) -> bool:
        """Whether all of it was measured by one version on one machine, so that seconds may be compared."""
        return len(self.versions) == 1 and len(self.machines) == 1

    def places(self, axis: str) -> list[float | str]:
        """Return the values of an axis that were measured: sizes in order, names as the task lists them."""
        found = {point[axis] for result in self.measured for point, _ in result.at}
        known = getattr(self.task, axis)
        names = sorted(
            (value for value in found if isinstance(value, str)),
            key=lambda name: (known.index(name) if name in known else len(known), name),
        )
        return [*sorted(value for value in found if not isinstance(value, str)), *names]

    def as_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("setting", "model", "versions", "machines", "prompts")}
        lines = [result.as_dict() for result in self.results]
        return {**own, "lines": lines, "experiment": self.experiment.model_dump(mode="json")}

    @property
    def ours(self) -> str:
        shortest, longest = self.prompts
        prompts = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        seeds = len(self.experiment.seeds)
        counts = {"sample": self.task.samples, "point": len(self.task.points()), "seed": seeds}
        row = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items())
        rows = f"N = {math.prod(counts.values())} a row ({row})"
        return f"{self.model}, {self.dtypes}, prompts of {prompts} tokens, {rows}"

    def blocks(self) -> Iterator[str | Picture]:
        setting = f"{self.origin} In brackets: 95 % of {RESAMPLES:,} bootstrap means over samples."
        if self._relative:
            setting += f" vs {self.experiment.baseline}: the difference from it, sample by sample."
        yield setting
        yield self.task.protocol
        if self.measured:
            yield _table(self)
            yield from _by_name(self)
        if not self.comparable:
            yield "The rows are of different versions or machines, named above: times are not to be compared."
        if self.measured:
            yield from _frontiers(self)
            yield Picture(f"{self.name}-quality", f"{self.title}, quality", partial(draw_quality, self))
            if self.task.mapped:
                yield Picture(f"{self.name}-map", f"{self.title}, by point", partial(draw_maps, self))

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
        if missing := [way for way in self.experiment.ways() if way not in there]:
            yield f"Not measured yet: {ways((code(method), budget) for method, budget in missing)}."

    def cases(self, claim: Claim) -> list[ClaimCase]:
        assert claim.metric is not None
        measured = {(result.method, result.budget): result for result in self.measured}
        cases = []
        for method in claim.methods:
            for budget in claim.budgets or self.experiment.budgets if "budget" in takes(method) else (None,):
                result = measured.get((method, budget))
                for other in claim.than or (None,):
                    name = code(method) if other is None else f"{code(method)} less {code(other)}"
                    values: list[float] = []
                    if result is not None and other is None:
                        values = result.values(claim.metric)
                    elif result is not None and other is not None:
                        beside = measured.get((other, budget)) or measured.get((other, None))
                        values = [] if beside is None else result.minus(beside.samples, claim.metric)
                    cases.append(ClaimCase(name, budget, values))
        return cases

    def judged(self) -> Iterator[Verdict]:
        """Yield a verdict for each claim that numbers decide, and for each of the paper's numbers of our methods."""
        yield from super().judged()
        for value in () if self.experiment.paper is None else self.experiment.paper.values:
            if is_ours(value.method):
                yield self.verdict(self._claim(value))

    def undecided(self) -> Iterator[str]:
        """Yield the claims that no metric decides, and the paper's numbers of methods that are not ours."""
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

    def _claim(self, value: PaperValue) -> Claim:
        """Return the claim that our number is the paper's."""
        metric = self.metric(value.metric)
        where = f" at {value.budget}" if value.budget else ""
        return Claim(
            says=f"{titled(metric)} of {value.method}{where}: {number(metric, value.value)}"
            + (f" ({value.note})" if value.note else ""),
            metric=value.metric,
            methods=(value.method,),
            budgets=(value.budget,) if value.budget else (),
            at_least=value.value,
            at_most=value.value,
        )


def is_ours(method: str) -> bool:
    """Return whether a method of a paper is one of ours; "" is none."""
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
    for metric in group.task.metrics:
        headings += [titled(metric), *([f"vs {baseline}"] if metric in relative else [])]
    headings += [*(["paper"] if paper else []), "held", *(["checkpoints"] if checkpoints else []), "prefill", "token"]
    rows = []
    for result in group.measured:
        entries = "all" if result.entries is None else "-".join(f"{n:,}" for n in dict.fromkeys(result.entries))
        cells = [code(result.method), result.budget or "-", entries]
        for metric in group.task.metrics:
            name = metric.name
            cells.append(text.estimate_text(metric, result.scores[name]) if name in result.scores else "-")
            if metric in relative:
                cells.append(text.difference_text(metric, result.beside[name]) if name in result.beside else "-")
        cells += [", ".join(map(group.paper_value, result.paper)) or "-"] if paper else []
        cells.append(text.megabytes(result.held_bytes))
        cells += [text.megabytes(result.checkpoint_bytes) if result.checkpoint_bytes else "-"] if checkpoints else []
        rows.append([*cells, f"{result.prefill_s:.2f} s", text.milliseconds(result.token_s)])
    return table(headings, rows)


def _by_name(group: TaskGroup) -> Iterator[str]:
    """Yield a table of the first metric for each axis of names: a column for each, the other axes' mean."""
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
            yield table([titled(metric), "budget", *(code(named(value)) for value in columns)], rows)


def _frontiers(group: TaskGroup) -> Iterator[str | Picture]:
    """Yield the rows on a frontier as a table, and a figure of each frontier; times that do not compare have none."""
    metric = group.task.metrics[0]
    axes = [axis for axis in AXES if any(axis.cost(result) is not None for result in group.measured)]
    axes = [axis for axis in axes if group.comparable or not axis.timed]
    of: dict[MethodResult, list[str]] = {}
    for axis in axes:
        for result in frontier(group.measured, metric, axis):
            of.setdefault(result, []).append(axis.name)
    yield "### The frontier"
    yield (
        f"A row is on a frontier where no other has less {' or '.join(axis.of for axis in axes)} and a better mean "
        f"({metric.label}). Memory is that of entries and checkpoints, wherever they are."
        + (" Times are of the machine's load while a row was measured." if group.comparable else "")
    )
    rows = []
    for result in sorted(of, key=lambda result: (result.total_bytes, group.measured.index(result))):
        quality = text.estimate_text(metric, result.scores[metric.name])
        cost = text.megabytes(result.total_bytes), text.milliseconds(result.token_s)
        rows.append([code(result.method), result.budget or "-", quality, *cost, listed(of[result])])
    yield table(["on the frontier", "budget", titled(metric), "memory", "token", "of"], rows, right=3)
    for axis in axes:
        title = f"{group.title}, quality against {axis.of}"
        yield Picture(f"{group.name}-frontier-{axis.name}", title, partial(draw_frontier, group, axis))
