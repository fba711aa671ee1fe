"""The figure of ``compare``: match and KL by bytes held, and KL at each position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import UsageError
from kvkeep_lab.comparisons import Comparisons, MethodAtBudget
from kvkeep_lab.figures import COLOURS, FilePath, blank, dress, save, styled

_LOWEST = -9  # lowest decade (nats) of an axis with lossy methods


def draw_comparisons(found: Comparisons, path: FilePath, *, title: str) -> None:
    """Draw token match (free-running) and KL (teacher-forced) by bytes held, and both KLs at each position for the
    smallest budget. Several passages give means with intervals. A single budget gives bars instead of lines. Raises
    UsageError if no method was measured."""
    lines = found.lines
    if not lines:
        raise UsageError("There is nothing to draw: no method was measured.")
    budgets = _budgets(lines)
    floor = _floor(lines)
    shown = [line for line in lines if line.budget in (None, *budgets[:1])]
    strips = 1.2 + 0.28 * len(shown)  # inches
    title = f"{title}: {found.measured}, against the full cache"
    title += ", with 95 % intervals" if len(found.passages) > 1 else ""
    if len(budgets) > 1:
        figure = blank(4.6 + strips)
        parts: Any = figure.subfigures(2, 1, height_ratios=[4.3, strips])
        _lines(parts[0], lines, budgets, floor)
        pair = parts[1].subplots(1, 2, sharey=True)
        _positions(pair, shown, floor, f" at {budgets[0]}")
        pair[0].set_yticks(range(len(shown)), [line.method for line in shown])
    else:
        figure = blank(0.7 + strips)
        grid: Any = figure.subplots(1, 4, sharey=True, width_ratios=[1, 1, 1.3, 1.3])
        _bars(grid[0], grid[1], shown, floor)
        _positions(grid[2:], shown, floor)
        title += f", budget {budgets[0]}" if budgets else ""
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def nats(value: float | None) -> str:
    """Return a KL as text; "0" only for exactly 0."""
    if not value:
        return "-" if value is None else "0"
    return f"{value:.3f}" if value >= 1e-2 else f"{value:.1e}"


def _budgets(lines: Sequence[MethodAtBudget]) -> list[str]:
    """Return the budgets as the user wrote them, sorted by bytes held."""
    names = dict.fromkeys(line.budget for line in lines if line.budget)
    middle = {name: median(line.held_bytes for line in lines if line.budget == name) for name in names}
    return sorted(middle, key=lambda name: middle[name])


def _floor(lines: Sequence[MethodAtBudget]) -> float:
    """Return the lowest KL that is drawn: a decade below the smallest KL of the lossy methods, or of the exact methods
    if there are no others."""
    found = [kl for line in lines if (kl := line.mean("kl_mean"))]
    others = [kl for line in lines if line.exactness != Exactness.EXACT and (kl := line.mean("kl_mean"))]
    smallest = min(others or found, default=1e-5)
    return 10.0 ** max(math.floor(math.log10(smallest)) - 1, _LOWEST if others else -20)


def _reach(
    lines: Sequence[MethodAtBudget], name: str, scale: float = 1.0, floor: float = 0.0
) -> tuple[list[float], Any]:
    """Return the means of a measure, and the distances of the ends of their intervals; None without values."""
    found = [line.estimate(name) for line in lines]
    means = [max(scale * one.mean, floor) if one else floor for one in found]
    if all(one is None or one.n == 1 for one in found):
        return means, None
    ends = [(max(scale * one.low, floor), max(scale * one.high, floor)) if one else (floor, floor) for one in found]
    below = [mean - low for mean, (low, _) in zip(means, ends, strict=True)]
    return means, [below, [high - mean for mean, (_, high) in zip(means, ends, strict=True)]]


def _lines(figure: Any, lines: Sequence[MethodAtBudget], budgets: Sequence[str], floor: float) -> None:
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(line.method for line in lines))
    apart = 0.03 if any(len(line.rows) > 1 for line in lines) else 0.0  # separates the intervals
    for number, name in enumerate(names):
        mine = sorted((line for line in lines if line.method == name), key=lambda line: line.held_bytes)
        megabytes = [line.held_bytes / 1e6 * math.exp(apart * (number - (len(names) - 1) / 2)) for line in mine]
        style = styled(number, name, None) | {"linestyle": "-" if number < len(COLOURS) else "--"}
        style |= {"clip_on": False, "zorder": 3, "capsize": 2.5, "elinewidth": 1}
        for axes, (means, reach) in (
            (left, _reach(mine, "match", 100)),
            (right, _reach(mine, "kl_mean", floor=floor)),
        ):
            axes.errorbar(megabytes, means, reach, **style)
    across = "keys and values held, for the budget asked"
    dress(left, "Match, free-running (%)", across, x="log")
    dress(right, "Mean KL, teacher-forced (nats)", across, x="log", y="log")
    for axes in (left, right):
        axes.xaxis.minorticks_off()
        axes.set_xticks(*_ticks(lines, budgets))
        axes.set_title(axes.get_title("left"), loc="left", fontsize=10, pad=9)
    left.set_ylim(0, 100)
    right.set_ylim(bottom=floor)
    if below := _below(lines, floor):
        words, place = f"below the axis: {below}", {"xycoords": "axes fraction", "textcoords": "offset points"}
        right.annotate(words, (0, 0), (6, 9), fontsize=8, **place)
    handles, labels = left.get_legend_handles_labels()
    columns = math.ceil(len(labels) / math.ceil(len(labels) / 7))  # rows of about the same length
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _ticks(lines: Sequence[MethodAtBudget], budgets: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return the marks of the bytes axis in MB, and their labels: each budget at its median, and methods without a
    budget if there is space."""
    marks = {median(line.held_bytes for line in lines if line.budget == name) / 1e6: name for name in budgets}
    for megabytes in sorted((line.held_bytes / 1e6 for line in lines if line.budget is None), reverse=True):
        if all(abs(math.log(megabytes / other)) > 0.4 for other in marks):
            marks[megabytes] = "no budget"
    return list(marks), [f"{megabytes:.3g} MB\n{name}" for megabytes, name in marks.items()]


def _bars(left: Any, right: Any, lines: Sequence[MethodAtBudget], floor: float) -> None:
    places = list(range(len(lines)))
    colours = [COLOURS[0] if line.exactness == Exactness.EXACT else "0.6" for line in lines]
    style: dict[str, Any] = {"color": colours, "height": 0.65, "error_kw": {"elinewidth": 1, "capsize": 2.5}}
    shares, reach = _reach(lines, "match", 100)
    matches = left.barh(places, shares, xerr=reach, **style)
    left.bar_label(matches, [f"{share:.0f}" for share in shares], padding=3, fontsize=9)
    left.set_xlim(0, 119)
    left.set_xticks([0, 50, 100])
    left.set_yticks(places, [line.method for line in lines])
    divergences, (drawn, reach) = [line.mean("kl_mean") or 0.0 for line in lines], _reach(lines, "kl_mean", 1.0, floor)
    bars = right.barh(places, [value - floor for value in drawn], left=floor, xerr=reach, **style)
    labels = [f"{nats(value)}{' (below the axis)' * (value < floor)}" for value in divergences]
    right.bar_label(bars, labels, padding=3, fontsize=9)
    dress(left, "Match, free-running (%)", "blue: methods that call themselves exact", grid="x")
    dress(right, "Mean KL, forced (nats)", x="log", grid="x")
    right.set_xlim(floor, max(10 * floor, *divergences) * 30)
    left.invert_yaxis()  # first row on top; both panels share the axis


def _positions(pair: Any, lines: Sequence[MethodAtBudget], floor: float, where: str = "") -> None:
    """Draw a strip for each method with a cell for each position, coloured by the logarithm of its KL: teacher-forced,
    then free-running."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    named = [
        (name, [line.positions(field) for line in lines])
        for name, field in (("teacher-forced", "kl"), ("free-running", "kl_free"))
    ]
    highest = max(value for _, strips in named for strip in strips for value in strip)
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
    style["norm"] = LogNorm(floor, max(highest, 10 * floor))
    for axes, (name, strips) in zip(pair, named, strict=True):
        image = axes.imshow([[max(value, floor) for value in strip] for strip in strips], **style)
        for number in range(1, len(lines)):
            axes.axhline(number - 0.5, color="white", linewidth=2)
        axes.set_title(f"KL{where}, {name} (nats)", loc="left", fontsize=10)
        axes.set_xlabel("token of the continuation")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(axis="y", length=0)
        axes.spines[:].set_visible(False)
    pair[0].figure.colorbar(image, ax=list(pair), pad=0.01, extend="min")


def _below(lines: Sequence[MethodAtBudget], floor: float) -> str:
    """Return a sentence on the methods whose KL lies below the axis, with their largest KL."""
    below: dict[str, float] = {}
    for line in lines:
        if (kl := line.mean("kl_mean")) is not None and kl < floor:
            below[line.method] = max(below.get(line.method, 0.0), kl)
    return ", ".join(f"{name} ({nats(value)})" for name, value in below.items())
