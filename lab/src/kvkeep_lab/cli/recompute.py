"""``kvkeep recompute``: is it faster to recompute evicted entries, or to read them?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, machine, note, out, print_json
from kvkeep.errors import Interrupted, UsageError, unknown

if TYPE_CHECKING:
    from kvkeep_lab.recompute import Report


def recompute(
    model: options.Model = "smollm2",
    counts: Annotated[
        str, typer.Option(help="Numbers of tokens, separated by commas.")
    ] = "1,5,10,50,100,200,500,1000,2000,4096",
    beside: Annotated[
        str, typer.Option(help="Random layers of other models' shapes, by commas; 'none' for none.")
    ] = "qwen2.5-0.5b,qwen3-0.6b,qwen2.5-1.5b",
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 5,
    slow: Annotated[bool, typer.Option(help="Also recall that runs whole layers: residual:4, tokens.")] = True,
    folder: options.Folder = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Also draw a figure (.png, .svg, .pdf).")] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Time keys and values of N tokens in one layer: recomputed, read, or attended where they lie."""
    from kvkeep.models.loading import load
    from kvkeep_lab.figures import check_figure
    from kvkeep_lab.recompute import run
    from kvkeep_lab.recompute_figure import draw_recompute
    from kvkeep_lab.shapes import SHAPES, shaped

    numbers = _counts(counts)
    others = [] if beside == "none" else [name.strip() for name in beside.split(",")]
    for name in others:
        if name not in SHAPES:
            raise unknown("shape", name, SHAPES)
    if output is not None:
        check_figure(output)
    loaded = load(model, dtype=dtype, device=device, progress=note)
    reports: list[Report] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        for name in (loaded.name, *others):
            own = name == loaded.name
            reports.append(
                run(
                    loaded.model if own else shaped(name, loaded.model.dtype, loaded.model.device),
                    name,
                    counts=numbers,
                    rounds=rounds,
                    slow=slow and own,
                    folder=folder,
                    progress=lambda text, done, total: bar.update(task, description=text, completed=done, total=total),
                )
            )
            if reports[-1].interrupted:
                break
    where = machine(loaded, dtype)
    drawn = output if output is not None and reports[0].rows else None
    if drawn is not None:
        draw_recompute(reports, drawn, title=f"Recompute or read? {dtype}, threads: {where['threads']}")
    if json:
        print_json({"machine": where, "models": [asdict(report) for report in reports], "figure": drawn})
    else:
        note(" ".join(f"{name}={value}" for name, value in where.items()))
        for report in reports:
            _tell(report)
    if reports[-1].interrupted:
        raise Interrupted("Interrupted; the figures above are of what was measured until then.")


def _counts(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UsageError(f"Counts '{text}' are not understood: give whole numbers, separated by commas (1,50,500).")
    return numbers


def _tell(report: Report) -> None:
    roof = report.roofline
    rates = ", ".join(f"{rate / 1e9:.2f} GB/s from {place}" for place, rate in roof.bandwidth.items())
    out.print(
        f"\n{report.model}: d = {report.hidden}, w = {report.width}, {report.itemsize} bytes an element, layers "
        f"{', '.join(map(str, report.layers))}; {roof.flops / 1e9:.0f} GFLOP/s, {rates}; projecting a residual "
        f"at hand beats reading from what gives less than {report.break_even_bytes_per_s / 1e9:.2f} GB/s",
        soft_wrap=True,
    )
    for place, buffers in dict.fromkeys((row.place, row.buffers) for row in report.rows):
        out.print(_table(report, place, buffers))
    out.print(
        "ms in one layer, the fastest round's; in brackets recompute's time relative to it: below 1, it is faster"
    )


def _table(report: Report, place: str, buffers: str) -> Table:
    from kvkeep_lab.recompute import RECOMPUTE

    rows = {(row.n, row.way): row for row in report.rows if (row.place, row.buffers) == (place, buffers)}
    ways = [way for way in dict.fromkeys(way for _, way in rows) if way != RECOMPUTE]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title=f"from {place}, {buffers} buffers")
    for heading in ("N", "recompute", *ways):
        table.add_column(heading.replace(", ", ",\n").replace(" in ", "\nin "), justify="right", no_wrap=True)
    for count in dict.fromkeys(count for count, _ in rows):
        cells = [_ms(rows[count, RECOMPUTE].ms)] if (count, RECOMPUTE) in rows else ["-"]
        for way in ways:
            row = rows.get((count, way))
            cells.append("-" if row is None else f"{_ms(row.ms)} ({_times(row.recompute_ratio)})")
        table.add_row(f"{count:,}", *cells)
    return table


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
