"""The chapters of experiments that measure methods at budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from kvkeep.lab.experiment import PaperValue
from kvkeep.lab.intervals import RESAMPLES
from kvkeep.lab.report.chapter import Chapter, Picture
from kvkeep.lab.report.figures import draw_maps, draw_quality
from kvkeep.lab.report.sections import Line, Section
from kvkeep.lab.report.telling import differing, number, titled, told
from kvkeep.lab.tasks.base import Metric


def chapters(found: Sequence[Section]) -> list[Chapter]:
    """Return a chapter for each section."""
    return [_chapter(section) for section in found]


def _chapter(section: Section) -> Chapter:
    experiment, paper = section.experiment, section.experiment.paper
    blocks: list[str | Picture] = [_setting(section), experiment.task.protocol, _table(section)]
    if notes := list(_notes(section)):
        blocks.append("\n".join(f"* {note}" for note in notes))
    if paper is not None:
        blocks.append("\n".join(_papers(section)))
    if section.measured:
        title = f"{experiment.title}: {section.model}"
        blocks.append(Picture(f"{section.name}-quality", f"{title}, quality", partial(draw_quality, section)))
        if experiment.task.mapped:
            blocks.append(Picture(f"{section.name}-map", f"{title}, by point", partial(draw_maps, section)))
    return Chapter(
        experiment.title,
        tuple(blocks),
        beside="" if paper is None else f"{paper.title}, {paper.where}",
        theirs="" if paper is None else paper.setting,
        ours=f"{section.model}, {section.machines[-1].get('dtype')}",
        missing=tuple(_missing(section)),
    )


def _setting(section: Section) -> str:
    experiment, machine = section.experiment, section.machines[-1]
    points, seeds = len(experiment.task.points()), len(experiment.seeds)
    shortest, longest = section.prompts
    machines = "; ".join(
        f"{one.get('device')}, {one.get('platform')}, threads {one.get('threads')}" for one in section.machines
    )
    versions = "; ".join(", ".join(f"{name} {version}" for name, version in one.items()) for one in section.versions)
    lines = [
        f"`{experiment.name}`: {section.model}, {machine.get('dtype')}, prompts of {shortest:,} to {longest:,} tokens, "
        f"N = {experiment.task.samples * points * seeds} a row ({experiment.task.samples} samples, {points} points, "
        f"{seeds} seeds). {machines}. {versions}.",
        f"In brackets: 95 % of {RESAMPLES:,} bootstrap means over samples.",
    ]
    if _relative(section):
        lines.append(f"vs {experiment.baseline}: the difference from it, sample by sample.")
    return " ".join(lines)


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
    headings += [*(["paper"] if paper else []), "held", "prefill", "token"]
    rows = ["| " + " | ".join(headings) + " |", "| --- | --- |" + " ---: |" * (len(headings) - 2)]
    for line in section.measured:
        assert line.scores is not None and line.beside is not None
        cells = [f"`{line.method}`", line.budget or "-", _entries(line)]
        for metric in metrics:
            cells.append(told(metric, line.scores[metric.name]))
            if metric in relative:
                cells.append(differing(metric, line.beside[metric.name]) if metric.name in line.beside else "-")
        cells += [", ".join(_paper_value(metrics, value) for value in line.paper) or "-"] if paper else []
        step = "-" if line.token_s is None else f"{1e3 * line.token_s:.0f} ms"
        rows.append(
            "| " + " | ".join([*cells, f"{line.held_bytes / 1e6:.1f} MB", f"{line.prefill_s:.2f} s", step]) + " |"
        )
    return "\n".join(rows)


def _entries(line: Line) -> str:
    if line.entries is None:
        return "all"
    return "-".join(f"{count:,}" for count in dict.fromkeys(line.entries))


def _paper_value(metrics: Sequence[Metric], value: PaperValue) -> str:
    metric = next(metric for metric in metrics if metric.name == value.metric)
    return f"{metric.label} {number(metric, value.value)}"


def _missing(section: Section) -> Iterator[str]:
    for line in section.lines:
        if line.cells < line.of:
            reason = f": {line.error}" if line.error else "."
            where = f" at {line.budget}" if line.budget else ""
            yield f"`{line.method}`{where}: {line.cells} of {line.of} cells{reason}"
    ways = {(line.method, line.budget) for line in section.lines}
    if missing := [way for way in section.experiment.ways() if way not in ways]:
        names = ", ".join(f"`{method}`{f' at {budget}' if budget else ''}" for method, budget in missing)
        yield f"Not measured yet: {names}."


def _notes(section: Section) -> Iterator[str]:
    yield from _missing(section)
    if not section.comparable:
        yield "The rows are of different versions or machines, named above: times are not to be compared."


def _papers(section: Section) -> Iterator[str]:
    paper, metrics = section.experiment.paper, section.experiment.task.metrics
    assert paper is not None
    ours = f"{section.model}, {section.machines[-1].get('dtype')}"
    yield f"Beside {paper.title}, {paper.where}. Theirs: {paper.setting}. Ours: {ours}."
    yield ""
    yield from (f"* The paper says: {claim}" for claim in paper.claims)
    for value in paper.values:
        who = " at ".join(part for part in (value.method, value.budget) if part)
        text = f"{who}: {_paper_value(metrics, value)}" if who else _paper_value(metrics, value)
        yield f"* The paper's number: {text}{f' ({value.note})' if value.note else ''}."
