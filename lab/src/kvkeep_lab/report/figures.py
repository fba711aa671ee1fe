"""A report's figures: the frontiers of quality, each method separately, and maps of a task's two axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep_lab.cell import named
from kvkeep_lab.figures import COLOURS, FilePath, blank, plain, save
from kvkeep_lab.report.formatting import shown, titled
from kvkeep_lab.report.labels import Label, place
from kvkeep_lab.report.methods import NOISE, Axis, MethodResult, frontier
from kvkeep_lab.tasks.base import Metric

if TYPE_CHECKING:
    from kvkeep_lab.experiment import Experiment
    from kvkeep_lab.store import TaskRecord
    from kvkeep_lab.tasks.base import Task

_BLUE = COLOURS[0]
_PANELS = 4
"""Maximum number of panels in a row."""


class DrawnGroup(Protocol):
    """The attributes of a :class:`~kvkeep_lab.report.tasks.TaskGroup` that figures read."""

    @property
    def experiment(self) -> Experiment: ...
    @property
    def model(self) -> str: ...
    @property
    def task(self) -> Task: ...
    @property
    def measured(self) -> list[MethodResult]: ...
    @property
    def records(self) -> Sequence[TaskRecord]: ...
    def places(self, axis: str) -> list[float | str]: ...


@contextmanager
def _figure(group: DrawnGroup, path: FilePath, height: float) -> Iterator[Any]:
    """Yield a figure, ``height`` in inches, and write it after the block. Raises StoreError if it cannot be written."""
    figure = blank(height)
    figure.suptitle(f"{group.experiment.title}: {group.model}", fontsize=11)
    yield figure
    save(figure, path)


def draw_frontier(group: DrawnGroup, axis: Axis, path: FilePath) -> None:
    """Draw the task's first metric against ``axis``. Every row is a point; grey lines join the points of a method; the
    frontier is in colour. Raises StoreError if the file cannot be written."""
    metric = group.task.metrics[0]
    at = {result: (cost, _mean(metric, result)) for result in group.measured if (cost := axis.cost(result)) is not None}
    best = frontier(list(at), metric, axis)
    with _figure(group, path, 5.6) as figure:
        axes = figure.subplots()
        for mine in _by_method(at).values():
            costs, means = zip(*(at[result] for result in mine), strict=True)
            axes.plot(costs, means, color="0.82", linewidth=1)
            axes.plot(costs, means, "o", color="0.65", markersize=4, clip_on=False)
        style: dict[str, Any] = {"color": _BLUE, "linewidth": 1.5, "marker": "o", "markersize": 6.5}
        axes.step(*zip(*(at[result] for result in best), strict=True), where="post", zorder=3, clip_on=False, **style)
        every = [cost for cost, _ in at.values()]
        axes.set_xscale("log")
        axes.set_xlim(right=1.15 * max(every))  # space for labels
        _plain_numbers(axes.xaxis, every)
        axes.set_xlabel(f"{axis.of} ({axis.unit})")
        axes.set_title(f"{titled(metric)}: {metric.better} is better", loc="left", fontsize=10)
        _quality_axis(axes, metric, group.measured)
        plain(axes, "both")
        labels = [Label(result.label, at[result], {"fontsize": 9, "color": _BLUE, "zorder": 5}) for result in best]
        for method, mine in _by_method(at).items():
            if method not in {result.method for result in best}:
                last = max(at[result] for result in mine)
                labels.append(Label(method, last, {"fontsize": 8, "color": "0.35"}))
        steps = [
            step for one, other in pairwise(best) for step in pairwise((at[one], (at[other][0], at[one][1]), at[other]))
        ]
        place(axes, labels, list(at.values()), steps)


def draw_quality(group: DrawnGroup, path: FilePath, metric: str | None = None) -> None:
    """Draw quality and memory with 95 % intervals. Each method has a panel with a metric, by default the task's first,
    against the bytes held, with the other methods in grey and the baseline as a line. For a single budget, draw bars of
    the metrics that have a difference from the baseline. Raises StoreError if the file cannot be written."""
    one_budget = len({result.budget for result in group.measured if result.budget is not None}) < 2
    methods = _by_method(group.measured)
    rows = math.ceil(len(methods.keys() - {group.experiment.baseline}) / _PANELS)
    with _figure(group, path, 1.2 + 0.3 * len(group.measured) if one_budget else 0.9 + 1.75 * rows) as figure:
        if one_budget:
            _bars(figure, group)
        else:
            drawn = next(one for one in group.task.metrics if metric in (None, one.name))
            _panels(figure, group, drawn, methods, rows)


def _bars(figure: Any, group: DrawnGroup) -> None:
    task, results = group.task, group.measured
    metrics = [metric for metric in task.metrics if metric.name in task.relative] or [task.metrics[0]]
    grid = figure.subplots(1, len(metrics), sharey=True, squeeze=False)
    colours = ["0.6" if result.method != group.experiment.baseline else _BLUE for result in results]
    for axes, metric in zip(grid[0], metrics, strict=True):
        means, reach = _means(metric, results)
        axes.barh(range(len(results)), means, xerr=reach, color=colours, height=0.65, error_kw={"elinewidth": 0.8})
        axes.set_title(titled(metric), loc="left", fontsize=10)
        if metric.kind == "share":
            axes.set_xlim(0, 100)
        plain(axes, "x")
    labels = [f"{result.label}, {result.held_bytes / 1e6:.1f} MB" for result in results]
    grid[0][0].set_yticks(range(len(results)), labels, fontsize=9)
    grid[0][0].invert_yaxis()  # first result on top; all panels share the axis


def _panels(figure: Any, group: DrawnGroup, metric: Metric, methods: dict[str, list[MethodResult]], rows: int) -> None:
    baseline = methods.pop(group.experiment.baseline, [])
    megabytes = {
        name: [result.held_bytes / 1e6 for result in sorted(mine, key=lambda result: result.held_bytes)]
        for name, mine in methods.items()
    }
    of = {name: _means(metric, sorted(mine, key=lambda result: result.held_bytes)) for name, mine in methods.items()}
    grid = list(figure.subplots(rows, _PANELS, sharex=True, sharey=True, squeeze=False).flat)
    for axes, name in zip(grid, methods, strict=False):
        for other, (means, _) in of.items():
            axes.plot(megabytes[other], means, color="0.87", linewidth=0.8, zorder=1)
        for result in baseline:
            if values := [value for mine in methods[name] for value in _paired(metric, result, mine)]:
                axes.axhline(shown(metric, fmean(values)), color="0.3", linewidth=0.8, linestyle=":")
        style: dict[str, Any] = {"color": _BLUE, "marker": "o", "markersize": 4, "elinewidth": 0.8, "capsize": 2}
        axes.errorbar(megabytes[name], of[name][0], yerr=of[name][1], zorder=3, clip_on=False, **style)
        axes.set_title(name, loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
        plain(axes, "both")
    for axes in grid[len(methods) :]:
        axes.set_visible(False)
    grid[0].set_xscale("log")
    _plain_numbers(grid[0].xaxis, [value for values in megabytes.values() for value in values])
    _quality_axis(grid[0], metric, group.measured)
    for axes in grid[max(0, len(methods) - _PANELS) : len(methods)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel(
        "keys and values held (MB); dotted: the baseline on the same samples; grey: the other methods", fontsize=9
    )
    figure.supylabel(titled(metric), fontsize=9)


def _paired(metric: Metric, baseline: MethodResult, result: MethodResult) -> list[float]:
    """Return the baseline's numbers at the places that a result has."""
    shared = (scores for place, scores in baseline.samples.items() if place in result.samples)
    return [value for scores in shared for value in scores.get(metric.name, ())]


def draw_maps(group: DrawnGroup, path: FilePath) -> None:
    """Draw a map for each metric of ``mapped`` and each value of the first axis: a row for each method, a column for
    each value of the second axis. Raises StoreError if the file cannot be written."""
    task, results = group.task, group.measured
    metrics = [metric for metric in task.metrics if metric.name in task.mapped]
    across, along = task.axes
    panels, ticks = group.places(across), group.places(along)
    columns = min(len(panels), _PANELS)
    rows = len(metrics) * math.ceil(len(panels) / columns)
    with _figure(group, path, rows * (1.1 + 0.27 * len(results))) as figure:
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        free = iter(grid.flat)
        for metric in metrics:
            values = [shown(metric, scores[metric.name]) for result in results for _, scores in result.at]
            limits = (0.0, 100.0) if metric.kind == "share" else (min(values), max(values))
            for panel in panels:
                axes = next(free)
                image = _map(axes, _cells(group, metric, panel), metric, limits)
                _ticks(axes, ticks)
                axes.set_title(f"{titled(metric)}, {across} {named(panel)}", loc="left", fontsize=10)
            for _ in range(-len(panels) % columns):
                next(free).set_visible(False)
            figure.colorbar(image, ax=axes, pad=0.01)
        for axes in grid[:, 0]:
            axes.set_yticks(range(len(results)), [result.label for result in results], fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel(f"{along} (%)" if along == "depth" else along)


_TENTHS = range(0, 100, 10)
"""Where the columns of a map of depths begin, in percent."""


def draw_depths(group: DrawnGroup, path: FilePath) -> None:
    """Draw the task's last metric by the depth of the answer in its text: a row for each method and a column for each
    tenth of the text, in a panel for each name on the last axis with names (all kinds of needles together, if the
    question is seen and if it is unseen). Raises StoreError if the file cannot be written."""
    metric, results = group.task.metrics[-1], group.measured
    axis = next((name for name in reversed(group.task.axes) if isinstance(group.places(name)[0], str)), None)
    panels = [None] if axis is None else group.places(axis)
    maps = [_by_depth(group, metric, axis, panel) for panel in panels]
    with _figure(group, path, 1.4 + 0.27 * len(results)) as figure:
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        limits = (0.0, 100.0)
        for axes, panel, cells in zip(grid, panels, maps, strict=True):
            image = _map(axes, cells, metric, limits)
            _ticks(axes, [start + 5 for start in _TENTHS])
            axes.set_title(titled(metric) + (f", {axis} {panel}" if axis else ""), loc="left", fontsize=10)
            axes.set_xlabel("depth of the answer (%)")
        grid[0].set_yticks(range(len(results)), [result.label for result in results], fontsize=8)
        figure.colorbar(image, ax=list(grid), pad=0.01)


def _by_depth(group: DrawnGroup, metric: Metric, axis: str | None, panel: Any) -> list[list[float]]:
    """Return means by result and tenth of the depth, over all points with ``panel`` on ``axis``; nan for none."""
    found: dict[tuple[str, str | None, int], list[float]] = {}
    for record in group.records:
        if record.status == "done" and (axis is None or record.point[axis] == panel):
            for depth, value in zip(record.depths, record.scores[metric.name], strict=True):
                if depth is not None:
                    tenth = min(int(depth) // 10, 9)
                    found.setdefault((record.method, record.budget, tenth), []).append(shown(metric, value))
    return [
        [fmean(values) if (values := found.get((one.method, one.budget, tenth))) else math.nan for tenth in range(10)]
        for one in group.measured
    ]


def _cells(group: DrawnGroup, metric: Metric, panel: float | str) -> list[list[float]]:
    """Return a map's numbers by method and value of the second axis; nan for missing numbers."""
    across, along = group.task.axes
    cells = []
    for result in group.measured:
        found = {
            point[along]: shown(metric, scores[metric.name]) for point, scores in result.at if point[across] == panel
        }
        cells.append([found.get(tick, math.nan) for tick in group.places(along)])
    return cells


def _map(axes: Any, cells: Sequence[Sequence[float]], metric: Metric, limits: tuple[float, float]) -> Any:
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="viridis", vmin=limits[0], vmax=limits[1])
    for row, row_cells in enumerate(cells):
        for column, cell in enumerate(row_cells):
            if not math.isnan(cell):
                text = f"{cell:.0f}" if metric.kind == "share" else f"{cell:.2g}"
                colour = "black" if cell > sum(limits) / 2 else "white"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _ticks(axes: Any, ticks: Sequence[float | str]) -> None:
    names = any(isinstance(tick, str) for tick in ticks)
    slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor", "fontsize": 8} if names else {}
    axes.set_xticks(range(len(ticks)), [named(tick) for tick in ticks], **slanted)


def _quality_axis(axes: Any, metric: Metric, results: Sequence[MethodResult]) -> None:
    """Scale the axis of a metric: from 0 if 0 is a possible value, logarithmic if less is better."""
    means = [_mean(metric, result) for result in results]
    if metric.kind == "share":
        axes.set_ylim(bottom=0)
    elif metric.kind == "perplexity":
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis, means)
    elif metric.better == "lower" and min(means) >= 0:
        smallest = min((mean for mean in means if mean > NOISE), default=NOISE)  # exact methods have about 0
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(smallest)))
        axes.set_ylim(0, 2 * max(means) or None)


def _plain_numbers(axis: Any, values: Sequence[float]) -> None:
    """Set the ticks of a logarithmic axis to a few round numbers within the range of ``values``."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    wide = high / low
    steps = (1, 1.5, 2, 3, 4, 5, 7) if wide < 8 else (1, 2, 3, 5) if wide < 40 else (1, 2, 5) if wide < 400 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if 0.7 * low <= tick <= 1.4 * high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _by_method(results: Iterable[MethodResult]) -> dict[str, list[MethodResult]]:
    of: dict[str, list[MethodResult]] = {}
    for result in results:
        of.setdefault(result.method, []).append(result)
    return of


def _mean(metric: Metric, result: MethodResult) -> float:
    return shown(metric, result.scores[metric.name].mean)


def _means(metric: Metric, results: Sequence[MethodResult]) -> tuple[list[float], list[list[float]]]:
    """Return means, and the lengths of their intervals below and above."""
    found = [result.scores[metric.name] for result in results]
    means, lows, highs = ([shown(metric, getattr(one, end)) for one in found] for end in ("mean", "low", "high"))
    below = [max(mean - low, 0.0) for mean, low in zip(means, lows, strict=True)]
    above = [max(high - mean, 0.0) for mean, high in zip(means, highs, strict=True)]
    return means, [below, above]
