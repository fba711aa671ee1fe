"""The figure of recompute or read: times of one model by N, and the ratio of every model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.figures import COLOURS, DPI, MARKERS, WIDTH_PX, plain, save
from kvkeep_lab.recompute import APART, ATTEND, READ, RECOMPUTE, ROLLED, Report, Row

PAPER = {1: (1.1, 1.1), 100: (0.46, 0.68), 500: (0.17, 0.3)}
"""KV-Direct's Fig. 7, as its section 5.8 tells it: the ratio of its models at N tokens, from least to most."""


def draw_recompute(reports: Sequence[Report], path: str | os.PathLike[str], *, title: str) -> None:
    """Draw the first model's times from memory and from disk, and below them the ratio of recompute to read of every
    model. Raises UsageError if there is nothing to draw, StoreError if the file cannot be written."""
    if not reports or not reports[0].rows:
        raise UsageError("There is nothing to draw: nothing was measured.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_PX / DPI, 9.4), dpi=DPI, layout="constrained")
    grid: Any = figure.subplots(2, 2, sharey="row")
    panels = (("device", "in memory"), ("disk", "on disk"))
    for column, (place, where) in enumerate(panels):
        _times(grid[0][column], reports[0], place, "cold")
        grid[0][column].set_title(
            f"{reports[0].model}: ms for one layer, {where}, cold buffers", loc="left", fontsize=10
        )
        _ratios(grid[1][column], reports, place)
        grid[1][column].set_title(
            f"recompute / read, {where} (thin: entry by entry; dotted: roofline)", loc="left", fontsize=10
        )
    for axes in grid.flat:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("N, tokens")
        plain(axes, "both")
    for axes in grid[0]:
        axes.legend(frameon=False, fontsize=8)
    handles, labels = grid[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def _times(axes: Any, report: Report, place: str, buffers: str) -> None:
    rows = [row for row in report.rows if row.place == place and row.buffers == buffers]
    for number, way in enumerate((RECOMPUTE, READ, ATTEND, APART, *ROLLED)):
        if not (mine := _by_count(rows, way)):
            continue
        colour = COLOURS[number % len(COLOURS)]
        counts = [row.n for row in mine]
        axes.plot(counts, [row.ms for row in mine], color=colour, marker=MARKERS[number], markersize=4, label=way)
        roofs = [row.roofline_ms for row in mine]
        if None not in roofs:
            axes.plot(counts, roofs, color=colour, linestyle=":", label=f"{way}, roofline")


def _ratios(axes: Any, reports: Sequence[Report], place: str) -> None:
    axes.axhline(1, color="0.4", linewidth=1)
    for number, report in enumerate(reports):
        colour = COLOURS[number % len(COLOURS)]
        for buffers, style in (("warm", "-"), ("cold", "--")):
            for way, width in ((READ, 1.5), (APART, 0.8)):
                mine = _by_count((row for row in report.rows if (row.place, row.buffers) == (place, buffers)), way)
                shown = [(row.n, row.recompute_ratio) for row in mine if row.recompute_ratio is not None]
                label = f"{report.model}, {buffers}" if way == READ else None
                mark = MARKERS[number] if way == READ else ""
                if shown:
                    axes.plot(*zip(*shown, strict=True), style, color=colour, marker=mark, markersize=3.5,
                              linewidth=width, alpha=1 if way == READ else 0.6, label=label)  # fmt: skip
        limit = _roof_ratio(report, place)
        if limit is not None:
            axes.axhline(limit, color=colour, linestyle=":", linewidth=1)
    for n, (low, high) in PAPER.items():
        axes.plot([n, n], [low * 0.97, high * 1.03], color="black", linewidth=5, alpha=0.5,
                  label="the paper's" if n == 1 else None)  # fmt: skip


def _roof_ratio(report: Report, place: str) -> float | None:
    roofs = {row.way: row.roofline_ms for row in report.rows if row.place == place}
    recompute, read = roofs.get(RECOMPUTE), roofs.get(READ)
    return recompute / read if recompute and read else None


def _by_count(rows: Any, way: str) -> list[Row]:
    return sorted((row for row in rows if row.way == way), key=lambda row: row.n)
