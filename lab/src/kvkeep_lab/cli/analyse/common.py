"""What the analyses share: a text for a model, progress, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli.output import err, machine, note, out, print_json, show
from kvkeep.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.models.loading import Loaded

LEAST = 16

File = Annotated[str, typer.Option("--file", "-f", help="The text to read, as it is; - is standard input.")]
Limit = Annotated[int, typer.Option(min=LEAST, help="Read only so many tokens of the text.")]
Output = Annotated[str | None, typer.Option("--output", "-o", help="Also draw a figure: a .png, .svg or .pdf file.")]


def read_ids(loaded: Loaded, file: str, limit: int) -> Tensor:
    """Return the first ``limit`` tokens of a text, (1, tokens). Raises UsageError for one that is too short."""
    import torch

    from kvkeep.decode.prompt import read_text

    ids = loaded.tokenizer(read_text(file), verbose=False).input_ids[:limit]
    if len(ids) < LEAST:
        raise UsageError(f"The text has {len(ids)} tokens; give one of at least {LEAST}.")
    return torch.tensor([ids])


def load(model: str, output: str | None, dtype: str, device: str | None) -> Loaded:
    """Load a model, after making sure that the figure could be written."""
    from kvkeep.models.loading import load as load_model
    from kvkeep_lab.figures import check_figure

    if output is not None:
        check_figure(output)
    return load_model(model, dtype=dtype, device=device, progress=note)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while something is done; an interrupt leaves nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        except KeyboardInterrupt:
            raise Interrupted("Interrupted before it was measured; there is nothing to show.") from None


def tell(
    loaded: Loaded,
    dtype: str,
    results: dict[str, Any],
    figure: str | None,
    json: bool,
    tables: list[Table],
    remarks: list[str],
) -> None:
    """Print ``results`` as one JSON object, or the tables and what is to be said of them."""
    where = machine(loaded, dtype)
    if json:
        print_json({"machine": where, **results, "figure": figure})
        return
    note(" ".join(f"{name}={value}" for name, value in where.items()))
    for table in tables:
        show(table)
    for remark in remarks:
        out.print(remark, style="dim", soft_wrap=True, markup=False)
    if figure is not None:
        note(f"The figure is in {figure}.")


def new_table(title: str, *headings: str) -> Table:
    """Return an empty table whose first column is text or a layer, and whose others are numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure as a person reads it, and "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def numbers(text: str, kind: type, what: str, example: str) -> list[Any]:
    """Return the numbers in a list by commas, each once, rising. Raises UsageError."""
    try:
        return sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(
            f"{what} '{text}' are not understood: give numbers, separated by commas ({example})."
        ) from None
