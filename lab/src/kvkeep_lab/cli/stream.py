"""``kvkeep stream``: a text of any length through one cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, note, out, print_json, size
from kvkeep.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from kvkeep_lab.stream import Stretch


def stream(
    file: Annotated[list[str], typer.Option("--file", "-f", help="A text; several are read one after another.")],
    model: options.Model = "smollm2",
    method: options.Method = "streaming-llm",
    budget: options.Budget = "512",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to read; a shorter text begins again.")] = 20_000,
    stretch: Annotated[int, typer.Option(min=2, help="Tokens to a line of the table.")] = 1024,
    chunk: options.Chunk = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Read a text of any length, and tell perplexity, time and memory along the way."""
    from kvkeep.cache import check_request, new_cache
    from kvkeep.decode.prompt import read_text
    from kvkeep.models.loading import load
    from kvkeep_lab.stream import stream as run

    check_request(method, budget, None, None)
    text = "\n\n".join(read_text(path) for path in file)
    loaded = load(model, dtype=dtype, device=device, progress=note)
    ids = list(loaded.tokenizer(text, verbose=False).input_ids)
    if len(ids) < 2:
        raise UsageError("The text is shorter than two tokens; there is nothing to predict.")
    ids = (ids * -(-tokens // len(ids)))[:tokens]
    cache = new_cache(loaded.model, method, budget=budget, chunk=chunk, context=len(ids))
    rows: list[Stretch] = []
    stopped: str | None = None
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=len(ids) - 1)
        try:
            for row in run(
                loaded.model, ids, cache, stretch=stretch, progress=lambda done, total: bar.update(task, completed=done)
            ):
                rows.append(row)
        except KeyboardInterrupt:
            stopped = "Interrupted; the figures above are of what was read until then."
        except UsageError as error:
            if not rows:
                raise
            stopped = f"{error} The figures above are of what was read until then."
    if json:
        print_json(
            {"model": loaded.name, "method": method, "budget": budget, "stretches": [asdict(row) for row in rows]}
        )
    else:
        out.print(_table(rows))
    if stopped is not None:
        raise Interrupted(stopped)


def _table(rows: list[Stretch]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("from token", "perplexity", "ms/token read", "ms/token one by one", "resident", "everything else"):
        table.add_column(heading, justify="right")
    for row in rows:
        memory = row.memory
        table.add_row(
            f"{row.start:,}",
            f"{row.perplexity:.2f}",
            f"{row.read_ms:.2f}",
            f"{row.step_ms:.1f}",
            size(memory.resident_bytes),
            size(memory.compressed_bytes + sum(memory.checkpoint_bytes.values()) + memory.bookkeeping_bytes),
        )
    return table
