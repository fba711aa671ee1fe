"""A report's figures: quality against memory, and maps of a task's two axes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from kvkeep.lab.figures import COLOURS, DPI, MARKERS, WIDTH_PX, plain, save
from kvkeep.lab.report import Line, Section, places, shown, titled
from kvkeep.lab.tasks.base import Metric, named

_PANELS, _COLUMNS = 4, 6
"""Maps beside each other."""


def draw_quality(section: Section, path: str | os.PathLike[str]) -> None:
    """Draw quality and memory, with 95 % intervals: the task's first metric against the bytes held, a line for each
    method and the baseline across; of one budget alone, bars of the metrics that are told relative to the baseline.
    Raises StoreError if the file cannot be written."""
    from matplotlib.figure import Figure

    alone = len({line.budget for line in section.measured if line.budget is not None}) < 2
    height = 1.2 + 0.3 * len(section.measured) if alone else 5.2
    figure = Figure(figsize=(WIDTH_PX / DPI, height), dpi=DPI, layout="constrained")
    (_bars if alone else _lines)(figure, section)
    figure.suptitle(f"{section.experiment.title}: {section.model}", fontsize=11)
    save(figure, path)


def _bars(figure: Any, section: Section) -> None:
    task, lines = section.experiment.task, section.measured
    metrics = [metric for metric in task.metrics if metric.name in task.relative] or [task.metrics[0]]
    grid: Any = figure.subplots(1, len(metrics), sharey=True, squeeze=False)
    places = list(range(len(lines)))
    colours = ["0.6" if line.method != section.experiment.baseline else COLOURS[0] for line in lines]
    for axes, metric in zip(grid[0], metrics, strict=True):
        means, below, above = zip(*(_bar(metric, line) for line in lines), strict=True)
        axes.barh(places, means, xerr=[below, above], color=colours, height=0.65, error_kw={"elinewidth": 0.8})
        axes.set_title(titled(metric), loc="left", fontsize=10)
        if metric.kind == "share":
            axes.set_xlim(0, 100)
        plain(axes, "x")
    grid[0][0].set_yticks(places, [f"{line.label}, {line.held_bytes / 1e6:.1f} MB" for line in lines], fontsize=9)
    grid[0][0].invert_yaxis()  # shared: the first line on top


def _lines(figure: Any, section: Section) -> None:
    metric = section.experiment.task.metrics[0]
    axes: Any = figure.subplots()
    methods = list(dict.fromkeys(line.method for line in section.measured))
    for number, method in enumerate(methods):
        mine = sorted((line for line in section.measured if line.method == method), key=lambda line: line.held_bytes)
        means, below, above = zip(*(_bar(metric, line) for line in mine), strict=True)
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(
            [line.held_bytes / 1e6 for line in mine],
            means,
            yerr=[below, above],
            label=method,
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            linestyle="-" if number < len(COLOURS) else "--",
            elinewidth=0.6,
            capsize=2,
            clip_on=False,
        )
        if method == section.experiment.baseline:
            axes.axhline(means[-1], color=colour, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.minorticks_off()
    ticks = _ticks(section)
    axes.set_xticks(list(ticks), [f"{held:.3g} MB\n{label}" for held, label in ticks.items()])
    axes.set_xlabel("keys and values held, for the budget asked")
    axes.set_title(titled(metric), loc="left", fontsize=10)
    if metric.kind == "share":
        axes.set_ylim(bottom=0)
    elif metric.better == "lower" and all(_bar(metric, line)[0] >= 0 for line in section.measured):
        axes.set_yscale("symlog", linthresh=_smallest(metric, section.measured))  # exact methods are at 0, or near
        axes.set_ylim(bottom=0)
    plain(axes, "both")
    columns = min(_COLUMNS, math.ceil(len(methods) / 2))
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, math.ceil(len(methods) / columns) - 2))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def draw_maps(section: Section, path: str | os.PathLike[str]) -> None:
    """Draw a map for each metric of ``mapped`` and each value of the first axis: a row for each method, a column for
    each value of the second axis. Raises StoreError if the file cannot be written."""
    from matplotlib.figure import Figure

    task = section.experiment.task
    metrics = [metric for metric in task.metrics if metric.name in task.mapped]
    across, along = task.axes
    panels, ticks = places(section, across), places(section, along)
    columns, lines = min(len(panels), _PANELS), section.measured
    rows = len(metrics) * math.ceil(len(panels) / columns)
    size = (WIDTH_PX / DPI, rows * (1.1 + 0.27 * len(lines)))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    grid: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
    free = iter(grid.flat)
    for metric in metrics:
        values = [shown(metric, scores[metric.name]) for line in lines for _, scores in line.at]
        low, high = (0.0, 100.0) if metric.kind == "share" else (min(values), max(values))
        for panel in panels:
            axes = next(free)
            image = _map(axes, lines, metric, (across, panel), (along, ticks), (low, high))
            axes.set_title(f"{titled(metric)}, {across} {named(panel)}", loc="left", fontsize=10)
        for _ in range(-len(panels) % columns):
            next(free).set_visible(False)
        figure.colorbar(image, ax=axes, pad=0.01)
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel(f"{along} (%)" if along == "depth" else along)
    figure.suptitle(f"{section.experiment.title}: {section.model}", fontsize=11)
    save(figure, path)


def _map(
    axes: Any,
    lines: Sequence[Line],
    metric: Metric,
    panel: tuple[str, float | str],
    columns: tuple[str, Sequence[float | str]],
    limits: tuple[float, float],
) -> Any:
    (across, value), (along, ticks) = panel, columns
    cells = []
    for line in lines:
        found = {
            point[along]: shown(metric, scores[metric.name]) for point, scores in line.at if point[across] == value
        }
        cells.append([found.get(tick, math.nan) for tick in ticks])
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="viridis", vmin=limits[0], vmax=limits[1])
    middle = sum(limits) / 2
    for row, line_cells in enumerate(cells):
        for column, cell in enumerate(line_cells):
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


def _bar(metric: Metric, line: Line) -> tuple[float, float, float]:
    """Return a mean and how far its interval goes down and up, as they are told."""
    assert line.scores is not None
    found = line.scores[metric.name]
    mean, low, high = (shown(metric, value) for value in (found.mean, found.low, found.high))
    return mean, max(mean - low, 0.0), max(high - mean, 0.0)


def _smallest(metric: Metric, lines: Sequence[Line]) -> float:
    """Return the decade of the smallest mean that is more than rounding: below it the axis is linear."""
    return 10.0 ** math.floor(
        math.log10(min((m for line in lines if (m := _bar(metric, line)[0]) > 1e-6), default=1e-6))
    )


def _ticks(section: Section) -> dict[float, str]:
    """Return where the bytes axis is marked, in MB: each budget at its median, and the baseline where there is room."""
    marks: dict[float, str] = {}
    for budget in (*section.experiment.budgets, None):
        held = sorted(line.held_bytes / 1e6 for line in section.measured if line.budget == budget)
        if held and all(abs(math.log(held[len(held) // 2] / other)) > 0.2 for other in marks):
            marks[held[len(held) // 2]] = budget or "no budget"
    return marks
