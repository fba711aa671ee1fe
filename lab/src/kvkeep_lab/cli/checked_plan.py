"""``kvkeep plan --check``: compares predictions with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli.output import err, note, out, print_json, show
from kvkeep.models.loading import Loaded
from kvkeep.plan.machine import Machine
from kvkeep.plan.shape import Shape
from kvkeep.units import size
from kvkeep_lab.plan_check import Checked, check


def check_plan(
    loaded: Loaded,
    shape: Shape,
    rates: Machine,
    contexts: Sequence[int],
    budget: str,
    only: str | None,
    rounds: int,
    *,
    json: bool,
) -> None:
    """Measure the caches of a plan, and print the errors of its predictions. only: parts of names of caches, separated
    by commas; None for all caches."""
    wanted = None if only is None else [part.strip() for part in only.split(",")]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        rows = check(
            loaded.model,
            shape,
            rates,
            contexts,
            budget,
            wanted=lambda label: wanted is None or any(part in label for part in wanted),
            rounds=rounds,
            progress=lambda label, done, total: progress.update(task, description=label, completed=done, total=total),
        )
    good, measured = sum(row.good for row in rows), sum(not row.error for row in rows)
    if json:
        listed = [
            {**asdict(row), "step_error": row.step_error, "prefill_error": row.prefill_error, "good": row.good}
            for row in rows
        ]
        print_json({"machine": asdict(rates), "rows": listed, "good": good, "measured": measured})
        return
    note(f"{rates.name} ({rates.source})")
    show(_table(rows))
    out.print(f"{good} of {measured} predictions are within 25 % of the measurement, for the prompt and for a token.")


def _table(rows: Sequence[Checked]) -> Table:
    table = Table(box=None, header_style="bold")
    headings = ["context", "cache", "bytes", "measured", "prompt (s)", "measured", "%", "token (ms)", "measured", "%"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for row in rows:
        if row.error or row.measured_step_s is None or row.measured_prefill_s is None:
            table.add_row(f"{row.context:,}", row.label, row.error)
            continue
        table.add_row(
            f"{row.context:,}",
            row.label,
            size(row.predicted_bytes),
            size(row.measured_bytes),
            f"{row.predicted_prefill_s:.2f}",
            f"{row.measured_prefill_s:.2f}",
            _percent(row.prefill_error),
            f"{1e3 * row.predicted_step_s:.1f}",
            f"{1e3 * row.measured_step_s:.1f}",
            _percent(row.step_error),
        )
    return table


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.0f}"
