"""``kvkeep longchat``: a long conversation, turn by turn, with several caches."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, machine, note, print_json, show, size
from kvkeep.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from kvkeep_lab.longchat import Turn

_SHOWN = 20  # lines of the table


def longchat(
    model: options.Model = "smollm2",
    methods: Annotated[
        str | None, typer.Option("--methods", "-x", help="By commas; the first is the reference. [default: all]")
    ] = None,
    budget: options.Budget = "256",
    checkpoint: options.Checkpoint = None,
    where: options.Where = None,
    turns: Annotated[int, typer.Option(min=1, help="Questions asked; they begin again when they run out.")] = 20,
    max_tokens: options.MaxTokens = 30,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Also draw a figure (.png, .svg, .pdf).")] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Hold one conversation with each cache, and tell memory and time of every turn."""
    from kvkeep.cache import check_request
    from kvkeep.models.loading import load
    from kvkeep_lab.figures import check_figure
    from kvkeep_lab.longchat import METHODS, caches, converse
    from kvkeep_lab.longchat_figure import draw_longchat

    names = METHODS if methods is None else tuple(name.strip() for name in methods.split(",") if name.strip())
    if not names:
        raise UsageError("There is no method in --methods; name some, separated by commas (stock,kv-direct).")
    for name in names:
        check_request(name, budget, checkpoint, where)
    if output is not None:
        check_figure(output)
    loaded = load(model, dtype=dtype, device=device, progress=note)
    listed = caches(loaded.model, names, budget=budget, checkpoint=checkpoint, where=where)
    rows: list[Turn] = []
    stopped: str | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=turns * len(names))
        try:
            for row in converse(
                loaded.model,
                loaded.tokenizer,
                listed,
                turns=turns,
                max_new_tokens=max_tokens,
                progress=lambda text, done, total: bar.update(task, description=text, completed=done),
            ):
                rows.append(row)
        except KeyboardInterrupt:
            stopped = "Interrupted; the figures above are of the turns until then."
        except UsageError as error:
            if not rows:
                raise
            stopped = f"{error} The figures above are of the turns until then."
    where_run = machine(loaded, dtype)
    if output is not None and rows:
        draw_longchat(rows, output, title=f"{loaded.name}: {rows[-1].turn} turns, budget {budget}")
    if json:
        print_json(
            {
                "machine": where_run,
                "budget": budget,
                "turns": [{**asdict(row), "seconds": row.seconds} for row in rows],
                "figure": output if rows else None,
            }
        )
    elif rows:
        note(" ".join(f"{name}={value}" for name, value in where_run.items()))
        show(_table(rows))
    if stopped is not None:
        raise Interrupted(stopped)


def _table(rows: list[Turn]) -> Table:
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold",
        caption="new: tokens read + written; ×: the turn's time relative to the first method's; same: whether "
        "the answer is the first method's",
    )
    for heading in ("turn", "cache", "context", "new", "read s", "write s", "×", "resident", "checkpoints", "same"):
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
    first, last = rows[0].method, rows[-1].turn
    rival = {row.turn: row.seconds for row in rows if row.method == first}
    for row in rows:
        if row.turn != 1 and row.turn % -(-last // _SHOWN) and row.turn != last:
            continue
        memory = row.memory
        kept = sum(memory.checkpoint_bytes.values())
        table.add_row(
            str(row.turn),
            row.method,
            f"{row.context:,}",
            f"{row.read}+{row.written}",
            f"{row.prefill_s:.2f}",
            f"{row.decode_s:.2f}",
            f"{row.seconds / rival[row.turn]:.2f}",
            size(memory.resident_bytes + memory.compressed_bytes),
            size(kept) if kept else "-",
            "yes" if row.same else "no",
        )
    for name in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == name]
        ratio = median(row.seconds / rival[row.turn] for row in mine)
        same = f"{sum(row.same for row in mine)}/{len(mine)}"
        table.add_row("all", name, "", "", "", "", f"{ratio:.2f}", "", "", same, style="bold")
    return table
