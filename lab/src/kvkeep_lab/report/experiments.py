"""The chapters of experiments that measure methods at budgets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from statistics import fmean

from kvkeep_lab.experiment import Experiment, PaperValue, load_experiment, packaged
from kvkeep_lab.intervals import RESAMPLES
from kvkeep_lab.report.chapter import Chapter, Picture
from kvkeep_lab.report.figures import draw_frontier, draw_maps, draw_quality
from kvkeep_lab.report.frontier import AXES, frontier
from kvkeep_lab.report.sections import Line, Section, places
from kvkeep_lab.report.telling import (
    code,
    differing,
    escaped,
    listed,
    megabytes,
    milliseconds,
    number,
    titled,
    told,
    ways,
)
from kvkeep_lab.report.verdicts import is_ours, verdicts
from kvkeep_lab.tasks.base import Metric, named


def chapters(found: Sequence[Section]) -> list[Chapter]:
    """Return a chapter for each section."""
    return [_chapter(section) for section in found]


def unmeasured(names: Collection[str]) -> list[Chapter]:
    """Return a chapter without blocks for each experiment that comes with the library and is not among ``names``."""
    bare = [load_experiment(name) for name in packaged() if name not in names]
    return [
        Chapter(
            one.title,
            (),
            beside="" if one.paper is None else f"{one.paper.title}, {one.paper.where}",
            missing=(f"`kvkeep lab run {one.name}` has not been run.",),
        )
        for one in bare
    ]


def _chapter(section: Section) -> Chapter:
    task = section.experiment.task
    blocks: list[str | Picture] = [_setting(section), task.protocol]
    if section.measured:
        blocks += [_table(section), *_by_name(section)]
    if not section.comparable:
        blocks.append("The rows are of different versions or machines, named above: times are not to be compared.")
    if section.measured:
        blocks += _frontiers(section)
        blocks.append(Picture(f"{section.name}-quality", f"{section.title}, quality", partial(draw_quality, section)))
        if task.mapped:
            blocks.append(Picture(f"{section.name}-map", f"{section.title}, by point", partial(draw_maps, section)))
    return section.chapter(
        blocks,
        ours=_brief(section),
        verdicts=verdicts(section.experiment, section.lines),
        undecided=list(_unjudged(section.experiment)),
        missing=_missing(section),
    )


def _brief(section: Section) -> str:
    task, (shortest, longest) = section.experiment.task, section.prompts
    prompts = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    counts = {"sample": task.samples, "point": len(task.points()), "seed": len(section.experiment.seeds)}
    row = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items())
    rows = f"N = {math.prod(counts.values())} a row ({row})"
    return f"{section.model}, {section.dtypes}, prompts of {prompts} tokens, {rows}"


def _setting(section: Section) -> str:
    sentences = [section.origin, f"In brackets: 95 % of {RESAMPLES:,} bootstrap means over samples."]
    if _relative(section):
        sentences.append(f"vs {section.experiment.baseline}: the difference from it, sample by sample.")
    return " ".join(sentences)


def _relative(section: Section) -> list[Metric]:
    task = section.experiment.task
    return [metric for metric in task.metrics if metric.name in task.relative]


def _table(section: Section) -> str:
    metrics, relative = section.experiment.task.metrics, _relative(section)
    paper = any(line.paper for line in section.lines)
    headings = ["method", "budget", "entries"]
    for metric in metrics:
        headings.append(titled(metric))
        headings += [f"vs {section.experiment.baseline}"] if metric in relative else []
    checkpoints = any(line.checkpoint_bytes for line in section.measured)
    headings += [*(["paper"] if paper else []), "held", *(["checkpoints"] if checkpoints else []), "prefill", "token"]
    rows = ["| " + " | ".join(headings) + " |", "| --- | --- |" + " ---: |" * (len(headings) - 2)]
    for line in section.measured:
        assert line.scores is not None and line.beside is not None
        cells = [f"`{line.method}`", line.budget or "-", _entries(line)]
        for metric in metrics:
            cells.append(told(metric, line.scores[metric.name]) if metric.name in line.scores else "-")
            if metric in relative:
                cells.append(differing(metric, line.beside[metric.name]) if metric.name in line.beside else "-")
        cells += [", ".join(_paper_value(metrics, value) for value in line.paper) or "-"] if paper else []
        cells.append(megabytes(line.held_bytes))
        cells += [megabytes(line.checkpoint_bytes) if line.checkpoint_bytes else "-"] if checkpoints else []
        cells += [f"{line.prefill_s:.2f} s", milliseconds(line.token_s)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _by_name(section: Section) -> Iterator[str]:
    """Yield a table of the first metric for each axis of names: a column for each, the other axes' mean."""
    metric = section.experiment.task.metrics[0]
    for axis in section.experiment.task.axes:
        columns = places(section, axis)
        if not any(isinstance(value, str) for value in columns):
            continue
        rows = [
            f"| {titled(metric)} | budget | " + " | ".join(code(named(value)) for value in columns) + " |",
            "| --- | --- |" + " ---: |" * len(columns),
        ]
        for line in section.measured:
            cells = []
            for value in columns:
                means = [scores[metric.name] for point, scores in line.at if point[axis] == value]
                cells.append(number(metric, fmean(means)) if means else "-")
            rows.append(f"| {code(line.method)} | {line.budget or '-'} | " + " | ".join(cells) + " |")
        yield "\n".join(rows)


def _frontiers(section: Section) -> Iterator[str | Picture]:
    """Yield the frontiers' rows as a table, and a figure of each; times that do not compare have none."""
    metric = section.experiment.task.metrics[0]
    axes = [axis for axis in AXES if any(axis.cost(line) is not None for line in section.measured)]
    axes = [axis for axis in axes if section.comparable or not axis.timed]
    of: dict[tuple[str, str | None], list[str]] = {}
    for axis in axes:
        for line in frontier(section.measured, metric, axis):
            of.setdefault((line.method, line.budget), []).append(axis.name)
    yield "### The frontier"
    yield (
        f"A row is on a frontier where no other has less {' or '.join(axis.of for axis in axes)} and a better mean "
        f"({metric.label}). Memory is that of entries and checkpoints, wherever they are."
        + (" Times are of the machine's load while a row was measured." if section.comparable else "")
    )
    rows = [
        f"| on the frontier | budget | {titled(metric)} | memory | token | of |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for line in sorted(section.measured, key=lambda line: line.total_bytes):
        if (names := of.get((line.method, line.budget))) is not None:
            assert line.scores is not None
            cells = (
                code(line.method),
                line.budget or "-",
                told(metric, line.scores[metric.name]),
                megabytes(line.total_bytes),
                milliseconds(line.token_s),
                listed(names),
            )
            rows.append(f"| {' | '.join(cells)} |")
    yield "\n".join(rows)
    for axis in axes:
        name = f"{section.name}-frontier-{axis.name}"
        yield Picture(name, f"{section.title}, quality against {axis.of}", partial(draw_frontier, section, axis))


def _entries(line: Line) -> str:
    if line.entries is None:
        return "all"
    return "-".join(f"{count:,}" for count in dict.fromkeys(line.entries))


def _paper_value(metrics: Sequence[Metric], value: PaperValue) -> str:
    metric = next(metric for metric in metrics if metric.name == value.metric)
    return f"{metric.label} {number(metric, value.value)}"


def _missing(section: Section) -> Iterator[str]:
    """Yield what is not there, and why: what has the same reason together."""
    reasons: dict[str, list[Line]] = {}
    for line in section.lines:
        if line.cells < line.of:
            reasons.setdefault(line.error, []).append(line)
    for error, lines in reasons.items():
        cells = {f"{line.cells} of {line.of} cells" for line in lines}
        names = ways((code(line.method), line.budget) for line in lines)
        yield f"{names}: {' or '.join(sorted(cells))} measured{f': {escaped(error)}' if error else ' so far.'}"
    there = {(line.method, line.budget) for line in section.lines}
    if missing := [way for way in section.experiment.ways() if way not in there]:
        yield f"Not measured yet: {ways((code(method), budget) for method, budget in missing)}."


def _unjudged(experiment: Experiment) -> Iterator[str]:
    """Yield the paper's claims and numbers for which there is no verdict."""
    paper, metrics = experiment.paper, experiment.task.metrics
    if paper is None:
        return
    yield from (f"The paper says: {claim.says}" for claim in paper.claims if claim.metric is None)
    for value in paper.values:
        if not value.method or not is_ours(value.method):
            who = " at ".join(part for part in (value.method, value.budget) if part)
            note = f" ({value.note})" if value.note else ""
            yield f"The paper's number: {f'{who}: ' if who else ''}{_paper_value(metrics, value)}{note}."
