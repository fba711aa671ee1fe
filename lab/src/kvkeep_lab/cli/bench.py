"""``kvkeep bench``: how fast and how large, against transformers' own cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, machine, note, out, print_json, size
from kvkeep.errors import Interrupted, UsageError, unknown

if TYPE_CHECKING:
    from kvkeep_lab.bench import Row


def bench(
    model: options.Model = "smollm2",
    contexts: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "512,2048,4096",
    budget: Annotated[str, typer.Option("--budget", "-b", help="The budget of whatever has one.")] = "12.5%",
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Decoding steps a round.")] = 16,
    only: Annotated[str | None, typer.Option(help="Only cases whose name contains one of these, by commas.")] = None,
    slow: Annotated[bool, typer.Option(help="Also what recomputes everything: naive, strides, tokens.")] = True,
    clock: Annotated[
        str, typer.Option(help="What to time by: wall, or processor, for a machine that others use, too.")
    ] = "wall",
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Time prefill and decoding of every cache in one run, and measure their memory."""
    from kvkeep.budget import Budget
    from kvkeep.cache import STOCK
    from kvkeep.models.loading import load
    from kvkeep_lab.bench import CLOCKS, INTERRUPTED, cases, run

    if clock not in CLOCKS:
        raise unknown("clock", clock, CLOCKS)
    lengths = _lengths(contexts)
    Budget.parse(budget)
    loaded = load(model, dtype=dtype, device=device, progress=note)
    listed = cases(loaded.model, lengths, budget, steps, slow=slow)
    if only is not None:
        wanted = [part.strip() for part in only.split(",")]
        listed = [case for case in listed if case.method == STOCK or any(part in case.label for part in wanted)]
    where = machine(loaded, dtype) | {"clock": clock}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        rows = run(
            loaded.model,
            listed,
            rounds=rounds,
            steps=steps,
            clock=clock,
            progress=lambda label, done, total: progress.update(task, description=label, completed=done, total=total),
        )
    if json:
        print_json({"machine": where, "rows": [asdict(row) for row in rows]})
    else:
        note(" ".join(f"{name}={value}" for name, value in where.items()))
        out.print(_table(rows))
    if any(row.error == INTERRUPTED for row in rows):
        raise Interrupted("Interrupted; the figures above are of what was measured until then.")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UsageError(f"Contexts '{text}' are not understood: give whole numbers, separated by commas (512,2048).")
    return lengths


def _table(rows: list[Row]) -> Table:
    table = Table(
        box=None,
        header_style="bold",
        caption="× : time relative to stock at the same context; × held: to a stock cache of the budget's entries only",
    )
    merging = any(row.merging_ms for row in rows)
    on_gpu = any("device_peak_bytes" in row.memory for row in rows)
    for heading in (
        "context",
        "cache",
        "prefill s",
        "×",
        "step ms",
        "×",
        "× held",
        "slowest ms",
        *(("mean ms", "of it merging") if merging else ()),
        "resident",
        "kept smaller or elsewhere",
        "workspace peak",
        *(("GPU peak",) if on_gpu else ()),
    ):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for row in rows:
        if row.error:
            table.add_row(str(row.context), row.label, row.error)
            continue
        kept = sum(row.memory["checkpoint_bytes"].values()) + row.memory["compressed_bytes"]
        table.add_row(
            str(row.context),
            row.label,
            _number(row.prefill_s, 2),
            _number(row.prefill_ratio, 2),
            _number(row.step_ms, 1),
            _number(row.step_ratio, 2),
            _number(row.held_ratio, 2),
            _number(row.slowest_ms, 1),
            *((_number(row.mean_ms, 1), _number(row.merging_ms, 1)) if merging else ()),
            size(row.memory["resident_bytes"]),
            size(kept) if kept else "-",
            size(row.memory["peak_workspace_bytes"]) if row.memory["peak_workspace_bytes"] else "-",
            *((size(row.memory["device_peak_bytes"]),) if on_gpu else ()),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
