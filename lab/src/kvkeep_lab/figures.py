"""Figures, drawn with matplotlib (``pip install 'kvkeep[figures]'``), which is imported only where one is wanted."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvkeep.errors import StoreError, UsageError
from kvkeep.policies.methods import Exactness

if TYPE_CHECKING:
    from kvkeep_lab.compare import Comparison, Row

FORMATS = (".png", ".svg", ".pdf")
WIDTH_PX, DPI = 1600, 160

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which people of every colour vision tell apart; markers differ as well."""

MARKERS = "osD^vPX*<>hp"
_LOWEST = -9  # the decade (nats) below which no axis goes that shows methods which are not exact


def check_figure(path: str | os.PathLike[str]) -> None:
    """Raise UsageError or StoreError for a figure that could not be written, before anything is measured for it."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise UsageError(f"The figure '{target}' has to end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if find_spec("matplotlib") is None:
        raise UsageError("Figures are drawn with matplotlib, which is missing: pip install 'kvkeep[figures]'.")
    if not target.parent.is_dir():
        raise StoreError(f"The figure '{target}' cannot be written: there is no folder '{target.parent}'.")
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise StoreError(f"The figure '{target}' cannot be written there.")


def draw_comparison(comparison: Comparison, path: str | os.PathLike[str], *, model: str) -> None:
    """Draw token match and KL by the bytes held, and KL at each position of the smallest budget.

    One budget alone gives bars instead of lines. Raises UsageError if no row was measured, StoreError if the file
    cannot be written.
    """
    rows = comparison.measured
    if not rows:
        raise UsageError("There is nothing to draw: no method was measured.")
    from matplotlib.figure import Figure

    budgets = _budgets(rows)
    floor = _floor(rows)
    shown = [row for row in rows if row.budget in (None, *budgets[:1])]
    strips = 1.2 + 0.28 * len(shown)  # inches
    title = (
        f"{model}: {comparison.prompt_tokens:,} tokens read, {comparison.new_tokens} written, against the full cache"
    )
    if len(budgets) > 1:
        figure = Figure(figsize=(WIDTH_PX / DPI, 4.6 + strips), dpi=DPI, layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[4.3, strips])
        _lines(parts[0], rows, budgets, floor)
        axes = parts[1].subplots()
        _positions(axes, shown, floor, f"KL at each position, budget {budgets[0]} (nats)")
        axes.set_yticks(range(len(shown)), [row.method for row in shown])
    else:
        figure = Figure(figsize=(WIDTH_PX / DPI, 0.7 + strips), dpi=DPI, layout="constrained")
        grid: Any = figure.subplots(1, 3, sharey=True, width_ratios=[1, 1, 1.6])
        _bars(grid[0], grid[1], shown, floor)
        _positions(grid[2], shown, floor, "KL at each position (nats)")
        title += f", budget {budgets[0]}" if budgets else ""
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write ``figure`` to ``path``; raises StoreError."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise StoreError(f"The figure '{path}' cannot be written: {(error.strerror or str(error)).lower()}.") from error


def _budgets(rows: Sequence[Row]) -> list[str]:
    """Return the budgets as asked, by the bytes that were held within them."""
    held = {row.budget: [one.held_bytes for one in rows if one.budget == row.budget] for row in rows if row.budget}
    return sorted(held, key=lambda budget: median(held[budget]))


def _floor(rows: Sequence[Row]) -> float:
    """Return the lowest KL that is drawn: a decade below the smallest of the methods that are not exact, or of those
    that are where there is no other."""
    exact: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        if row.kl_mean:
            exact[row.exactness == Exactness.EXACT].append(row.kl_mean)
    smallest = min(exact[False], default=min(exact[True], default=1e-5))
    return 10.0 ** max(math.floor(math.log10(smallest)) - 1, _LOWEST if exact[False] else -20)


def _lines(figure: Any, rows: Sequence[Row], budgets: Sequence[str], floor: float) -> None:
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(row.method for row in rows)):
        mine = sorted((row for row in rows if row.method == name), key=lambda row: row.held_bytes)
        held = [row.held_bytes / 1e6 for row in mine]
        style: dict[str, Any] = {
            "label": name,
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": "-" if number < len(COLOURS) else "--",
            "clip_on": False,
            "zorder": 3,
        }
        left.plot(held, [_hundredths(row) for row in mine], **style)
        right.plot(held, [max(row.kl_mean or 0.0, floor) for row in mine], **style)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(*_ticks(rows, budgets))
        axes.set_xlabel("keys and values held, for the budget asked")
        plain(axes, "both")
    left.set_title("Tokens that are the full cache's (%)", loc="left", fontsize=10, pad=9)
    left.set_ylim(0, 100)
    right.set_title("Mean KL from the full cache (nats)", loc="left", fontsize=10, pad=9)
    right.set_yscale("log")
    right.set_ylim(bottom=floor)
    if told := _below(rows, floor):
        right.annotate(
            f"below the axis: {told}", (0, 0), (6, 9), xycoords="axes fraction", textcoords="offset points", fontsize=8
        )
    handles, labels = left.get_legend_handles_labels()
    columns = math.ceil(len(labels) / math.ceil(len(labels) / 7))  # rows of about the same length
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _ticks(rows: Sequence[Row], budgets: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return where the bytes axis is marked, in MB, and the labels: each budget at its median, and whatever was held
    without a budget where there is room for it."""
    marks = {median(row.held_bytes for row in rows if row.budget == name) / 1e6: name for name in budgets}
    for held in sorted((row.held_bytes / 1e6 for row in rows if row.budget is None), reverse=True):
        if all(abs(math.log(held / other)) > 0.4 for other in marks):
            marks[held] = "no budget"
    return list(marks), [f"{held:.3g} MB\n{name}" for held, name in marks.items()]


def _bars(left: Any, right: Any, rows: Sequence[Row], floor: float) -> None:
    places = list(range(len(rows)))
    colours = [COLOURS[0] if row.exactness == Exactness.EXACT else "0.6" for row in rows]
    divergences = [row.kl_mean or 0.0 for row in rows]
    matches = left.barh(places, [_hundredths(row) for row in rows], color=colours, height=0.65)
    left.bar_label(matches, [f"{_hundredths(row):.0f}" for row in rows], padding=3, fontsize=9)
    left.set_title("The full cache's tokens (%)", loc="left", fontsize=10)
    left.set_xlim(0, 119)
    left.set_xticks([0, 50, 100])
    left.set_xlabel("blue: methods that call themselves exact")
    left.set_yticks(places, [row.method for row in rows])
    bars = right.barh(
        places, [max(value - floor, 0.0) for value in divergences], left=floor, color=colours, height=0.65
    )
    right.set_xscale("log")
    right.bar_label(bars, [_nats(value, floor) for value in divergences], padding=3, fontsize=9)
    right.set_title("Mean KL (nats)", loc="left", fontsize=10)
    right.set_xlim(floor, max(10 * floor, *divergences) * 30)
    for axes in (left, right):
        plain(axes, "x")
    left.invert_yaxis()  # shared: the first row on top


def _positions(axes: Any, rows: Sequence[Row], floor: float, title: str) -> None:
    """Draw one strip a method, a cell a position, coloured by the logarithm of its KL."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    highest = max(value for row in rows for value in row.kl)
    cells = [[max(value, floor) for value in row.kl] for row in rows]
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        norm=LogNorm(floor, max(highest, 10 * floor)),
        extent=(-0.5, len(cells[0]) - 0.5, len(cells) - 0.5, -0.5),
    )
    for number in range(1, len(rows)):
        axes.axhline(number - 0.5, color="white", linewidth=2)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("token of the continuation")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.figure.colorbar(image, ax=axes, pad=0.01, extend="min")


def _below(rows: Sequence[Row], floor: float) -> str:
    """Say whose KL lies below the axis, and where its largest is."""
    below: dict[str, float] = {}
    for row in rows:
        if row.kl_mean is not None and row.kl_mean < floor:
            below[row.method] = max(below.get(row.method, 0.0), row.kl_mean)
    return ", ".join(f"{name} ({_nats(value)})" for name, value in below.items())


def _hundredths(row: Row) -> float:
    return 100 * (row.match or 0.0)


def _nats(value: float, floor: float = 0.0) -> str:
    text = "0" if value == 0 else f"{value:.2g}"
    return f"{text} (below the axis)" if value < floor else text


def plain(axes: Any, grid: Any) -> None:
    """Leave out the frame's top and right, and draw a light grid along ``grid`` ("x", "y" or "both")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
