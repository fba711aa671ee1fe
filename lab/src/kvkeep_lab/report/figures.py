"""A report's figures: the frontiers of quality, each method by itself, and maps of a task's two axes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvkeep_lab.figures import COLOURS, DPI, WIDTH_PX, plain, save
from kvkeep_lab.report.formatting import shown, titled
from kvkeep_lab.report.frontier import NOISE, Axis, frontier
from kvkeep_lab.report.labels import Label, place
from kvkeep_lab.report.methods import MethodResult
from kvkeep_lab.tasks.base import Metric, named

if TYPE_CHECKING:
    from kvkeep_lab.report.tasks import TaskGroup

_BLUE = COLOURS[0]
_PANELS = 4
"""Maps, or methods, beside each other."""


def draw_frontier(group: TaskGroup, axis: Axis, path: str | os.PathLike[str]) -> None:
    """Draw the task's first metric against ``axis``: every row a point, the points of a method joined in grey, those on
    the frontier and the line through them in colour. Raises StoreError if the file cannot be written."""
    from matplotlib.figure import Figure

    metric = group.task.metrics[0]
    points = {result: cost for result in group.measured if (cost := axis.cost(result)) is not None}
    best = frontier(list(points), metric, axis)
    figure = Figure(figsize=(WIDTH_PX / DPI, 5.6), dpi=DPI, layout="constrained")
    axes: Any = figure.subplots()
    for method in dict.fromkeys(result.method for result in points):
        mine = [result for result in points if result.method == method]  # by budget
        costs, means = [points[result] for result in mine], [_mean(metric, result) for result in mine]
        axes.plot(costs, means, color="0.82", linewidth=1)
        axes.plot(costs, means, "o", color="0.65", markersize=4, clip_on=False)
    axes.step(
        [points[result] for result in best],
        [_mean(metric, result) for result in best],
        where="post",
        color=_BLUE,
        linewidth=1.5,
        marker="o",
        markersize=6.5,
        zorder=3,
        clip_on=False,
    )
    axes.set_xscale("log")
    axes.set_xlim(right=1.15 * max(points.values()))  # room for words
    _plain_numbers(axes.xaxis, points.values())
    axes.set_xlabel(f"{axis.of} ({axis.unit})")
    axes.set_title(f"{titled(metric)}: {metric.better} is better", loc="left", fontsize=10)
    _quality_axis(axes, metric, group.measured)
    plain(axes, "both")
    figure.suptitle(f"{group.experiment.title}: {group.model}", fontsize=11)
    at = {result: (cost, _mean(metric, result)) for result, cost in points.items()}
    labels = [Label(result.label, at[result], {"fontsize": 9, "color": _BLUE, "zorder": 5}) for result in best]
    others = [result for result in points if result.method not in {one.method for one in best}]
    for method in dict.fromkeys(result.method for result in others):
        last = max((result for result in others if result.method == method), key=points.__getitem__)
        labels.append(Label(method, at[last], {"fontsize": 8, "color": "0.35"}))
    corners = [
        (first, second)
        for one, other in pairwise(best)
        for first, second in pairwise((at[one], (at[other][0], at[one][1]), at[other]))
    ]
    place(axes, labels, list(at.values()), corners)
    save(figure, path)


def draw_quality(group: TaskGroup, path: str | os.PathLike[str]) -> None:
    """Draw quality and memory, with 95 % intervals: a panel for each method with the task's first metric against the
    bytes held, the other methods in grey and the baseline across; of one budget alone, bars of the metrics that are
    told relative to the baseline. Raises StoreError if the file cannot be written."""
    from matplotlib.figure import Figure

    budgets = {result.budget for result in group.measured if result.budget is not None}
    figure = Figure(dpi=DPI, layout="constrained")
    (_bars if len(budgets) < 2 else _methods)(figure, group)
    figure.suptitle(f"{group.experiment.title}: {group.model}", fontsize=11)
    save(figure, path)


def _bars(figure: Any, group: TaskGroup) -> None:
    task, results = group.task, group.measured
    figure.set_size_inches(WIDTH_PX / DPI, 1.2 + 0.3 * len(results))
    metrics = [metric for metric in task.metrics if metric.name in task.relative] or [task.metrics[0]]
    grid: Any = figure.subplots(1, len(metrics), sharey=True, squeeze=False)
    places = list(range(len(results)))
    colours = ["0.6" if result.method != group.experiment.baseline else _BLUE for result in results]
    for axes, metric in zip(grid[0], metrics, strict=True):
        means, below, above = zip(*(_bar(metric, result) for result in results), strict=True)
        axes.barh(places, means, xerr=[below, above], color=colours, height=0.65, error_kw={"elinewidth": 0.8})
        axes.set_title(titled(metric), loc="left", fontsize=10)
        if metric.kind == "share":
            axes.set_xlim(0, 100)
        plain(axes, "x")
    grid[0][0].set_yticks(
        places, [f"{result.label}, {result.held_bytes / 1e6:.1f} MB" for result in results], fontsize=9
    )
    grid[0][0].invert_yaxis()  # shared: the first result on top


def _methods(figure: Any, group: TaskGroup) -> None:
    metric, baseline = group.task.metrics[0], group.experiment.baseline
    of: dict[str, list[MethodResult]] = {}
    for result in sorted(group.measured, key=lambda result: result.held_bytes):
        of.setdefault(result.method, []).append(result)
    across = [_mean(metric, result) for result in of.get(baseline, ())]
    names = [name for name in dict.fromkeys(result.method for result in group.measured) if name != baseline]
    rows = math.ceil(len(names) / _PANELS)
    figure.set_size_inches(WIDTH_PX / DPI, 0.9 + 1.75 * rows)
    grid: Any = figure.subplots(rows, _PANELS, sharex=True, sharey=True, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        for other in names:
            held = [result.held_bytes / 1e6 for result in of[other]]
            axes.plot(held, [_mean(metric, result) for result in of[other]], color="0.87", linewidth=0.8, zorder=1)
        for mean in across:
            axes.axhline(mean, color="0.3", linewidth=0.8, linestyle=":")
        means, below, above = zip(*(_bar(metric, result) for result in of[name]), strict=True)
        held = [result.held_bytes / 1e6 for result in of[name]]
        style: dict[str, Any] = {"color": _BLUE, "marker": "o", "markersize": 4, "elinewidth": 0.8, "capsize": 2}
        axes.errorbar(held, means, yerr=[below, above], zorder=3, clip_on=False, **style)
        axes.set_title(name, loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
        plain(axes, "both")
    for axes in list(grid.flat)[len(names) :]:
        axes.set_visible(False)
    first: Any = grid[0][0]
    first.set_xscale("log")
    _plain_numbers(first.xaxis, [result.held_bytes / 1e6 for name in names for result in of[name]])
    _quality_axis(first, metric, group.measured)
    for axes in list(grid.flat)[max(0, len(names) - _PANELS) : len(names)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("keys and values held (MB); dotted: the baseline; grey: the other methods", fontsize=9)
    figure.supylabel(titled(metric), fontsize=9)


def _quality_axis(axes: Any, metric: Metric, results: Sequence[MethodResult]) -> None:
    """Scale the axis of a metric: from 0 on where that is a number of it, by decades where less is better."""
    if metric.kind == "share":
        axes.set_ylim(bottom=0)
    elif metric.better == "lower" and all(_mean(metric, result) >= 0 for result in results):
        axes.set_yscale("symlog", linthresh=_smallest(metric, results))  # exact methods are at 0, or near
        axes.set_ylim(0, 2 * max(_mean(metric, result) for result in results) or None)


def _plain_numbers(axis: Any, values: Any) -> None:
    """Mark a logarithmic axis at a few round numbers within ``values``."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    wide = high / low
    steps = (1, 1.5, 2, 3, 4, 5, 7) if wide < 8 else (1, 2, 3, 5) if wide < 40 else (1, 2, 5) if wide < 400 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if 0.7 * low <= tick <= 1.4 * high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_maps(group: TaskGroup, path: str | os.PathLike[str]) -> None:
    """Draw a map for each metric of ``mapped`` and each value of the first axis: a row for each method, a column for
    each value of the second axis. Raises StoreError if the file cannot be written."""
    from matplotlib.figure import Figure

    task = group.task
    metrics = [metric for metric in task.metrics if metric.name in task.mapped]
    across, along = task.axes
    panels, ticks = group.places(across), group.places(along)
    columns, results = min(len(panels), _PANELS), group.measured
    rows = len(metrics) * math.ceil(len(panels) / columns)
    size = (WIDTH_PX / DPI, rows * (1.1 + 0.27 * len(results)))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    grid: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
    free = iter(grid.flat)
    for metric in metrics:
        values = [shown(metric, scores[metric.name]) for result in results for _, scores in result.at]
        low, high = (0.0, 100.0) if metric.kind == "share" else (min(values), max(values))
        for panel in panels:
            axes = next(free)
            image = _map(axes, results, metric, (across, panel), (along, ticks), (low, high))
            axes.set_title(f"{titled(metric)}, {across} {named(panel)}", loc="left", fontsize=10)
        for _ in range(-len(panels) % columns):
            next(free).set_visible(False)
        figure.colorbar(image, ax=axes, pad=0.01)
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(results)), [result.label for result in results], fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel(f"{along} (%)" if along == "depth" else along)
    figure.suptitle(f"{group.experiment.title}: {group.model}", fontsize=11)
    save(figure, path)


def _map(
    axes: Any,
    results: Sequence[MethodResult],
    metric: Metric,
    panel: tuple[str, float | str],
    columns: tuple[str, Sequence[float | str]],
    limits: tuple[float, float],
) -> Any:
    (across, value), (along, ticks) = panel, columns
    cells = []
    for result in results:
        found = {
            point[along]: shown(metric, scores[metric.name]) for point, scores in result.at if point[across] == value
        }
        cells.append([found.get(tick, math.nan) for tick in ticks])
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="viridis", vmin=limits[0], vmax=limits[1])
    middle = sum(limits) / 2
    for row, row_cells in enumerate(cells):
        for column, cell in enumerate(row_cells):
            if not math.isnan(cell):
                text = f"{cell:.0f}" if metric.kind == "share" else f"{cell:.2g}"
                axes.text(
                    column, row, text, ha="center", va="center", fontsize=7, color="black" if cell > middle else "white"
                )
    names = any(isinstance(tick, str) for tick in ticks)
    slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor", "fontsize": 8} if names else {}
    axes.set_xticks(range(len(ticks)), [named(tick) for tick in ticks], **slanted)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _bar(metric: Metric, result: MethodResult) -> tuple[float, float, float]:
    """Return a mean and how far its interval goes down and up, as they are told."""
    found = result.scores[metric.name]
    mean, low, high = (shown(metric, value) for value in (found.mean, found.low, found.high))
    return mean, max(mean - low, 0.0), max(high - mean, 0.0)


def _mean(metric: Metric, result: MethodResult) -> float:
    return shown(metric, result.scores[metric.name].mean)


def _smallest(metric: Metric, results: Sequence[MethodResult]) -> float:
    """Return the decade of the smallest mean that is more than rounding: below it the axis is linear."""
    return 10.0 ** math.floor(
        math.log10(min((mean for result in results if (mean := _mean(metric, result)) > NOISE), default=NOISE))
    )
