"""Reports of stores: a table for each experiment and model, the paper's numbers beside ours, and figures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kvkeep.errors import StoreError, UsageError
from kvkeep.lab.experiment import Experiment, PaperValue
from kvkeep.lab.intervals import RESAMPLES, Estimate, estimate
from kvkeep.lab.store import Row, Store
from kvkeep.lab.tasks.base import Metric, Point, named


@dataclass(frozen=True)
class Line:
    """One method at one budget, over all points, seeds and samples.

    scores: by metric. beside: the difference from the baseline, sample by sample. held_bytes: mean over the cells of
    the bytes of entries that attention reads. prefill_s, token_s: means of seconds of a prompt, and of each token
    after the first. entries: the fewest and the most of a full layer. cells: how many were measured, of how many.
    at: each point's mean of each metric. error: why a cell is missing.
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
    prefill_s: float = 0.0
    token_s: float | None = None
    at: tuple[tuple[Point, dict[str, float]], ...] = ()
    paper: tuple[PaperValue, ...] = ()
    error: str = ""

    @property
    def label(self) -> str:
        """Method and budget as a person reads them."""
        return self.method if self.budget is None else f"{self.method} at {self.budget}"


@dataclass(frozen=True)
class Section:
    """An experiment of one setting (sizes, data, dtype) on one model.

    versions, machines: all that took part. prompts: tokens of the shortest and of the longest.
    """

    experiment: Experiment
    setting: str
    model: str
    lines: tuple[Line, ...]
    versions: tuple[dict[str, str], ...]
    machines: tuple[dict[str, Any], ...]
    prompts: tuple[int, int]
    started: str

    @property
    def measured(self) -> list[Line]:
        """The lines that have numbers."""
        return [line for line in self.lines if line.scores]

    @property
    def name(self) -> str:
        """What files about it are called."""
        model = Path(self.model).name.removesuffix(".gguf")
        return f"{self.experiment.name}-{model}-{self.setting[:6]}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain types."""
        lines = [{**asdict(line), "paper": [value.model_dump() for value in line.paper]} for line in self.lines]
        return {**asdict(self), "experiment": self.experiment.model_dump(mode="json"), "lines": lines}


def sections(stores: Sequence[Store]) -> list[Section]:
    """Return what ``stores`` hold (already read), the latest of each experiment first. Raises UsageError if that is
    nothing, or of an experiment that this version cannot read."""
    definitions = {one.setting: one.experiment for store in stores for one in store.definitions}
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in (row for store in stores for row in store.rows):
        cells = groups.setdefault((row.setting, row.model), {})
        if row.status == "done" or cells.get(row.cell, row).status == "failed":
            cells[row.cell] = row
    made = [
        _section(_experiment(definitions[setting]), setting, model, list(cells.values()))
        for (setting, model), cells in groups.items()
        if setting in definitions
    ]
    if not made:
        raise UsageError("There is nothing to report: no cell of an experiment is in these results.")
    made.sort(key=lambda section: section.started, reverse=True)
    return sorted(made, key=lambda section: section.experiment.name)


def _experiment(given: dict[str, Any]) -> Experiment:
    try:
        return Experiment.model_validate(given)
    except ValueError as error:
        name = given.get("name", "")
        raise UsageError(
            f"The results of experiment '{name}' are of a version of kvkeep whose words are gone."
        ) from error


def _section(experiment: Experiment, setting: str, model: str, rows: Sequence[Row]) -> Section:
    ways: dict[tuple[str, str | None], list[Row]] = {way: [] for way in experiment.ways()}
    for row in rows:
        ways.setdefault((row.method, row.budget), []).append(row)
    first = next((rows for (method, _), rows in ways.items() if method == experiment.baseline), [])
    baseline = {_where(row): row.scores for row in first if row.status == "done"}
    lines = tuple(_line(experiment, *way, rows, baseline) for way, rows in ways.items() if rows)
    tokens = [count for row in rows for count in row.prompt_tokens] or [0]
    return Section(
        experiment,
        setting,
        model,
        lines,
        _different(row.versions for row in rows),
        _different(row.machine for row in rows),
        (min(tokens), max(tokens)),
        max(row.started for row in rows),
    )


def _line(
    experiment: Experiment, method: str, budget: str | None, rows: Sequence[Row], baseline: dict[Any, dict[str, Any]]
) -> Line:
    done = [row for row in rows if row.status == "done"]
    expected = max(len(rows), len(experiment.task.points()) * len(experiment.seeds))
    paper = tuple(value for value in _paper_values(experiment) if (value.method, value.budget) == (method, budget))
    error = next((row.error for row in rows if row.status == "failed"), "")
    if not done:
        return Line(method, budget, 0, expected, paper=paper, error=error)
    scores, beside = {}, {}
    for metric in experiment.task.metrics:
        if not (values := [value for row in done for value in row.scores[metric.name]]):
            continue  # no sample is about it
        scores[metric.name] = estimate(values)
        pairs = [
            mine - theirs
            for row in done
            if _where(row) in baseline
            for mine, theirs in zip(row.scores[metric.name], baseline[_where(row)][metric.name], strict=True)
        ]
        if pairs and method != experiment.baseline:
            beside[metric.name] = estimate(pairs)
    steps = [value for row in done for value in row.token_s if value is not None]
    entries = [row.entries for row in done if row.entries is not None]
    return Line(
        method,
        budget,
        len(done),
        expected,
        exactness=done[-1].exactness,
        entries=(min(entries), max(entries)) if entries else None,
        scores=scores,
        beside=beside,
        held_bytes=fmean(row.held_bytes for row in done),
        prefill_s=fmean(value for row in done for value in row.prefill_s),
        token_s=fmean(steps) if steps else None,
        at=tuple(_at(done)),
        paper=paper,
        error=error,
    )


def _at(done: Sequence[Row]) -> Iterator[tuple[Point, dict[str, float]]]:
    points: dict[str, tuple[Point, list[Row]]] = {}
    for row in done:
        points.setdefault(json.dumps(row.point, sort_keys=True), (row.point, []))[1].append(row)
    for point, rows in points.values():
        found = {name: [value for row in rows for value in row.scores[name]] for name in rows[0].scores}
        yield point, {name: fmean(values) for name, values in found.items() if values}


def _where(row: Row) -> tuple[str, int]:
    return json.dumps(row.point, sort_keys=True), row.seed


def _paper_values(experiment: Experiment) -> tuple[PaperValue, ...]:
    return () if experiment.paper is None else experiment.paper.values


def _different(found: Any) -> tuple[dict[str, Any], ...]:
    return tuple({json.dumps(one, sort_keys=True): one for one in found}.values())


# -- Markdown -----------------------------------------------------------------------------------------


def markdown(found: Sequence[Section], figures: dict[str, list[str]] | None = None) -> str:
    """Return the report; ``figures``: names of picture files by section name."""
    parts = ["# Results of the lab"]
    for section in found:
        parts += list(_part(section, (figures or {}).get(section.name, [])))
    return "\n\n".join(parts) + "\n"


def _part(section: Section, figures: Sequence[str]) -> Iterator[str]:
    experiment = section.experiment
    yield f"## {experiment.title}"
    yield _ours(section)
    yield experiment.task.protocol
    yield _table(section)
    yield from _by_name(section)
    if notes := list(_notes(section)):
        yield "\n".join(f"* {note}" for note in notes)
    if experiment.paper is not None:
        yield "\n".join(_papers(section))
    yield from (f"![{Path(name).stem}]({name})" for name in figures)


def _ours(section: Section) -> str:
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
            cells.append(told(metric, line.scores[metric.name]) if metric.name in line.scores else "-")
            if metric in relative:
                cells.append(_difference(metric, line.beside[metric.name]) if metric.name in line.beside else "-")
        cells += [", ".join(_paper_value(metrics, value) for value in line.paper) or "-"] if paper else []
        step = "-" if line.token_s is None else f"{1e3 * line.token_s:.0f} ms"
        rows.append(
            "| " + " | ".join([*cells, f"{line.held_bytes / 1e6:.1f} MB", f"{line.prefill_s:.2f} s", step]) + " |"
        )
    return "\n".join(rows)


def places(section: Section, axis: str) -> list[float | str]:
    """Return the values of an axis that were measured: sizes in order, names as the task lists them."""
    found = {point[axis] for line in section.measured for point, _ in line.at}
    listed = getattr(section.experiment.task, axis)
    names = sorted(
        (value for value in found if isinstance(value, str)),
        key=lambda name: (listed.index(name) if name in listed else len(listed), name),
    )
    return [*sorted(value for value in found if not isinstance(value, str)), *names]


def _by_name(section: Section) -> Iterator[str]:
    """Yield a table of the first metric for each axis of names: a column for each, the other axes' mean."""
    metric = section.experiment.task.metrics[0]
    for axis in section.experiment.task.axes:
        columns = places(section, axis)
        if not any(isinstance(value, str) for value in columns):
            continue
        rows = [
            f"| {titled(metric)} | budget | " + " | ".join(f"`{named(value)}`" for value in columns) + " |",
            "| --- | --- |" + " ---: |" * len(columns),
        ]
        for line in section.measured:
            cells = []
            for value in columns:
                means = [scores[metric.name] for point, scores in line.at if point[axis] == value]
                cells.append(_number(metric, fmean(means)) if means else "-")
            rows.append(f"| `{line.method}` | {line.budget or '-'} | " + " | ".join(cells) + " |")
        yield "\n".join(rows)


def _entries(line: Line) -> str:
    if line.entries is None:
        return "all"
    return "-".join(f"{count:,}" for count in dict.fromkeys(line.entries))


def titled(metric: Metric) -> str:
    """Return what stands over a column of a metric, or over its figure."""
    return f"{metric.label} (%)" if metric.kind == "share" else metric.label


def told(metric: Metric, found: Estimate) -> str:
    """Return an estimate as a person reads it, its interval in brackets."""
    mean, low, high = (_number(metric, value) for value in (found.mean, found.low, found.high))
    return mean if found.n == 1 else f"{mean} [{low}, {high}]"


def shown(metric: Metric, value: float) -> float:
    """Return a mean as it is told: percent of a share, the perplexity of nats."""
    return {"share": 100 * value, "number": value, "perplexity": math.exp(value)}[metric.kind]


def _number(metric: Metric, value: float) -> str:
    return f"{shown(metric, value):.1f}" if metric.kind == "share" else f"{shown(metric, value):.3g}"


def _difference(metric: Metric, found: Estimate) -> str:
    values = (found.mean, found.low, found.high)
    if metric.kind == "perplexity":
        mean, low, high = (f"× {math.exp(value):.3g}" for value in values)
    else:
        mean, low, high = (
            f"{shown(metric, value):+.1f}" if metric.kind == "share" else f"{value:+.3g}" for value in values
        )
    return mean if found.n == 1 else f"{mean} [{low}, {high}]"


def _paper_value(metrics: Sequence[Metric], value: PaperValue) -> str:
    metric = next(metric for metric in metrics if metric.name == value.metric)
    return f"{metric.label} {_number(metric, value.value)}"


def _notes(section: Section) -> Iterator[str]:
    for line in section.lines:
        if line.cells < line.of:
            reason = f": {line.error}" if line.error else "."
            where = f" at {line.budget}" if line.budget else ""
            yield f"`{line.method}`{where}: {line.cells} of {line.of} cells{reason}"
    ways = {(line.method, line.budget) for line in section.lines}
    if missing := [way for way in section.experiment.ways() if way not in ways]:
        names = ", ".join(f"`{method}`{f' at {budget}' if budget else ''}" for method, budget in missing)
        yield f"Not measured yet: {names}."
    if len(section.versions) > 1 or len(section.machines) > 1:
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
        number = f"{who}: {_paper_value(metrics, value)}" if who else _paper_value(metrics, value)
        yield f"* The paper's number: {number}{f' ({value.note})' if value.note else ''}."


def write(found: Sequence[Section], folder: Path) -> list[Path]:
    """Write ``report.md`` and the figures, each as PNG and SVG, into ``folder``, and return the files.

    Raises UsageError where matplotlib is missing, StoreError where they cannot be written.
    """
    from kvkeep.lab.figures import check_figure
    from kvkeep.lab.report_figures import draw_maps, draw_quality

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"The folder '{folder}' cannot be made: {(error.strerror or str(error)).lower()}.") from error
    check_figure(folder / "report.png")
    files: list[Path] = []
    pictures: dict[str, list[str]] = {}
    for section in (section for section in found if section.measured):
        for kind, draw in (("quality", draw_quality), ("map", draw_maps)):
            if kind == "map" and not section.experiment.task.mapped:
                continue
            drawn = [folder / f"{section.name}-{kind}{suffix}" for suffix in (".png", ".svg")]
            for path in drawn:
                draw(section, path)
            files += drawn
            pictures.setdefault(section.name, []).append(drawn[0].name)
    page = folder / "report.md"
    try:
        page.write_text(markdown(found, pictures), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"The report '{page}' cannot be written: {(error.strerror or str(error)).lower()}.") from error
    return [page, *files]
