"""Draw the figure of docs/results/tools.md from lab-tool-calls-shared.jsonl: how many right calls each method loses, in
the families that the page's main tables show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep_lab.figures import COLOURS, panels, plain
from kvkeep_lab.report import groups
from kvkeep_lab.report.methods import MethodResult
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.store import ResultFile

from kvkeep.budget import Budget

STORE = Path(__file__).parents[1] / "docs" / "results" / "lab-tool-calls-shared.jsonl"
FIGURE = STORE.with_name("tool-calls.png")
FAMILIES = ("simple_python", "live_simple")
POINTS = 2
"""The loss that the page asks about, in points."""
TICKS = (-5, 0, 2, 5, 10, 20, 50)


def main() -> None:
    """Write the figure."""
    store = ResultFile(STORE)
    store.refresh()
    measured = sorted((one for one in groups([store]) if isinstance(one, TaskGroup)), key=lambda group: group.model)
    rows = [_rows(group) for group in measured]
    budgets = sorted({row.budget for mine in rows for row in mine}, key=_amount, reverse=True)
    most = max(map(len, rows))
    title = f"Right calls lost against the full cache, 95 % intervals over questions; dotted: {POINTS} points"
    with panels(FIGURE, title, len(measured), 1.2 + 0.25 * most, sharex=True) as drawn:
        for axes, group, mine in zip(drawn, measured, rows, strict=True):
            _draw(axes, mine, budgets)
            axes.set_ylim(most - 0.5, -0.5)
            axes.set_title(group.model, loc="left", fontsize=10)
    print(FIGURE.name)


def _rows(group: TaskGroup) -> list[MethodResult]:
    """Return the results in these families: the largest budget first, and the least loss first."""
    records = [record for record in group.records if record.point["family"] in FAMILIES]
    found = [result for result in replace(group, records=records).measured if result.budget]
    return sorted(found, key=lambda one: (-_amount(one.budget), -one.beside["right"].mean))


def _amount(budget: str | None) -> float:
    return Budget.parse(budget).amount


def _draw(axes: Any, rows: Sequence[MethodResult], budgets: Sequence[str | None]) -> None:
    for number, row in enumerate(rows):
        one, colour = row.beside["right"], COLOURS[budgets.index(row.budget)]
        mean, ends = -100 * one.mean, [[100 * (one.high - one.mean)], [100 * (one.mean - one.low)]]
        axes.errorbar(mean, number, xerr=ends, fmt="o", markersize=4, color=colour)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.axvline(POINTS, color="0.3", linewidth=0.8, linestyle=":")
    labels = [f"{row.label.replace('%', ' %')}, N = {row.beside['right'].n}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_xlabel("points lost (log beyond 10)")
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xticks(TICKS, list(map(str, TICKS)))
    plain(axes, "x")


if __name__ == "__main__":
    main()
