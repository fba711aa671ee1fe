"""The plan as a figure: times by memory, with the frontiers of exact and lossy methods."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.contracts.exactness import Exactness
from kvkeep_lab.figures import COLOURS, blank, dress, save

if TYPE_CHECKING:
    from kvkeep.plan.planner import Planned, Row

EXACT, OTHER = COLOURS[:2]


def draw_plan(planned: Planned, path: str | os.PathLike[str], *, model: str) -> None:
    """Draw every row that fits. A line joins the best rows, and a ring marks the recommended one.

    Raises StoreError if the file cannot be written.
    """
    figure = blank(5.6)
    left, right = figure.subplots(1, 2, sharex=True)
    _panel(left, planned, lambda row: 1e3 * row.cost.step, "Time of a token (ms)", named=True)
    _panel(right, planned, lambda row: row.cost.prefill, "Time of the prompt (s)", named=False)
    figure.suptitle(
        f"{Path(model).stem}: {planned.context:,} tokens within {planned.memory / 1e6:,.0f} MB, predicted for "
        f"{planned.machine.name} ({planned.machine.source})",
        fontsize=10,
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    save(figure, path)


def _panel(axes: Any, planned: Planned, value: Callable[[Row], float], title: str, *, named: bool) -> None:
    from matplotlib.ticker import FuncFormatter

    for exact, colour, label in ((True, EXACT, "exact"), (False, OTHER, "not exact")):
        rows = [row for row in planned.rows if (row.exactness == Exactness.EXACT) is exact]
        best = [row for row in rows if row.frontier]
        if not rows:
            continue
        axes.scatter(*_points(rows, value), s=14, color=colour, alpha=0.35, linewidths=0)
        # Lossy rows also differ in the entries that they read, so no line joins the best ones.
        style = {"marker": "os"[not exact], "linestyle": "-" if exact else "", "markersize": 4, "label": label}
        axes.plot(*_points(best, value), color=colour, **style)
        if named:
            _name(axes, best, value, colour, above=exact)
    ring = planned.best
    axes.scatter(*_points([ring], value), s=130, facecolors="none", edgecolors="black", label="recommended", zorder=4)
    dress(axes, title, "memory of the device at the worst moment (MB)", x="log", y="log")
    axes.margins(x=0.08, y=0.22)
    plain = FuncFormatter(lambda number, place: f"{number:,.10g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(plain)
        axis.set_minor_formatter("")


def _points(rows: list[Row], value: Callable[[Row], float]) -> tuple[list[float], list[float]]:
    return [row.memory / 1e6 for row in rows], [value(row) for row in rows]


def _name(axes: Any, rows: list[Row], value: Callable[[Row], float], colour: str, *, above: bool) -> None:
    """Write the names of the rows where the method changes along the frontier; overlapping names are stacked."""
    if not rows:
        return
    labels: list[tuple[Row, list[str]]] = []
    for row in rows:
        name = str(row.candidate)
        if any(name in names for _, names in labels):
            continue
        if labels and row.memory < 3 * labels[-1][0].memory:
            labels[-1][1].append(name)
        else:
            labels.append((row, [name]))
    edge = (max if above else min)(value(row) for row in rows)
    for row, names in labels:
        axes.annotate(
            "\n".join(names),
            (row.memory / 1e6, edge),
            (-2, 9 if above else -9),
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
            va="bottom" if above else "top",
        )
