"""``kvkeep compare``: what each method costs in quality on your own text, at several budgets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, machine, note, out, print_json, size
from kvkeep.errors import Interrupted, KvkeepError, UsageError

if TYPE_CHECKING:
    from kvkeep_lab.compare import Comparison, Row

METHODS = "kv-direct,streaming-llm,h2o,snapkv,tova,window"
BUDGETS = "12.5%,25%,50%"


def compare(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The question or instruction.")] = None,
    file: Annotated[str | None, typer.Option("--file", "-f", help="A text to read first; - is standard input.")] = None,
    model: options.Model = "smollm2",
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-x",
            help=f"Methods, separated by commas or by repeating the option; see 'kvkeep methods'. [default: {METHODS}]",
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            "-b",
            help="Budgets in the same way: entries per layer (64), bytes (4MB), shares of prompt and continuation "
            f"(25%). [default: {BUDGETS}]",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to write and to compare; ends of text are ignored.")
    ] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only so many tokens of the file.")] = None,
    raw: Annotated[
        bool | None,
        typer.Option(
            "--raw/--chat",
            help="Continue the text as it is, or put it into the model's chat template. "
            "[default: --raw for a file without a prompt]",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Draw a figure too: a .png, .svg or .pdf file.")
    ] = None,
    chunk: options.Chunk = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Compare methods and budgets with the full cache: tokens, KL, perplexity, bytes, speed."""
    from kvkeep.cache import check_request
    from kvkeep.decode.prompt import encode, question, read_text, shortened
    from kvkeep.models.loading import load
    from kvkeep_lab.compare import INTERRUPTED, cases
    from kvkeep_lab.compare import compare as run
    from kvkeep_lab.figures import check_figure, draw_comparison
    from kvkeep_lab.reading import takes

    methods, budgets = specs(method or [METHODS]), _parts(budget or [BUDGETS])
    for name in methods:
        takes(name)
    for amount in budgets:
        check_request(None, amount, None, None)
    listed = cases(methods, budgets)
    if output is not None:
        check_figure(output)
    text = read_text(file) if file else None
    question(text, prompt)  # refuses an empty request before the model is loaded
    loaded = load(model, dtype=dtype, device=device, progress=note)
    if text is not None and limit is not None:
        text, count = shortened(loaded.tokenizer, text, limit)
        if count > limit:
            note(f"Only the first {limit:,} of the text's {count:,} tokens are read.")
    plain = raw if raw is not None else bool(file) and not prompt
    ids = encode(loaded.tokenizer, question(text, prompt), raw=plain)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=None)
        try:
            comparison = run(
                loaded.model,
                ids,
                listed,
                new=max_tokens,
                chunk=chunk,
                progress=lambda label, done, total: progress.update(
                    task, description=label, completed=done, total=total
                ),
            )
        except KeyboardInterrupt:
            raise Interrupted("Interrupted before the full cache was measured; there is nothing to compare.") from None
    where = machine(loaded, dtype)
    figure = output if comparison.measured else None
    if figure is not None:
        draw_comparison(comparison, figure, model=f"{loaded.name}, {dtype}")
    if json:
        print_json({"machine": where, **comparison.as_dict(), "figure": figure})
    else:
        note(" ".join(f"{name}={value}" for name, value in where.items()))
        show(comparison)
        if figure is not None:
            note(f"The figure is in {figure}.")
    if any(row.error == INTERRUPTED for row in comparison.rows):
        raise Interrupted("Interrupted; the figures above are of what was measured until then.")
    if not comparison.measured:
        raise KvkeepError("No method could be measured; the reasons are above.")


def specs(texts: Sequence[str]) -> list[str]:
    """Return the methods in ``texts``, in order, each once.

    Commas separate them, except that ``key=value`` after a comma is one more parameter of the method before it:
    ``h2o:recent=0.5,sinks=4,window`` is two methods.
    """
    found: list[str] = []
    for part in _parts(texts):
        if found and re.match(r"[^:+]*=", part):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return list(dict.fromkeys(found))


def _parts(texts: Sequence[str]) -> list[str]:
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("There is nothing to compare: name methods (-x kv-direct,h2o) and budgets (-b 64,25%).")
    return parts


# -- the table ----------------------------------------------------------------------------------------

Column = tuple[str, Callable[["Row"], str], Callable[["Row"], float | None] | None]
"""A heading, what stands in a row, and what makes a row the best of its budget (the smallest is), if anything does."""


def show(comparison: Comparison) -> None:
    """Print the table, in two parts where the terminal is too narrow for it, and what was refused."""
    named, quality = _NAMED, _quality(comparison.reference)
    if any(row.recalled is not None for row in comparison.measured):
        quality = [*quality, *_RECALL]
    whole = _table(comparison, [*named, *quality, *_COST])
    needed = Measurement.get(out, out.options.update(width=1000), whole).maximum
    if needed <= out.width or not out.is_terminal:
        Console(width=max(needed, out.width), highlight=False).print(whole)
    else:
        out.print(_table(comparison, [named[0], named[2], *quality]))
        out.print()
        out.print(_table(comparison, [*named, *_COST]))
    for row in comparison.rows:
        if row.error:
            out.print(f"{_label(row)}: {row.error}", style="yellow")
    for row in comparison.measured:
        if (pairs := row.merges[0]) > 0:
            out.print(f"{_label(row)}: {pairs:,} pairs merged, {row.merges[1]:,} shares of keys clamped.", style="dim")
    out.print(
        f"{comparison.prompt_tokens:,} tokens read, {comparison.new_tokens} written; stock is the reference. "
        "KL in nats, the best of each budget in bold.",
        style="dim",
    )


def _label(row: Row) -> str:
    return f"{row.method} at {row.budget}" if row.budget else row.method


_NAMED: list[Column] = [
    ("method", lambda row: row.method, None),
    ("class", lambda row: row.exactness, None),
    ("budget", lambda row: row.budget or "-", None),
]


def _quality(reference: Row) -> list[Column]:
    def surprise(row: Row) -> float | None:
        """How far the perplexity is from the reference's: one that is too sure is no better than one that is not."""
        assert reference.perplexity is not None
        return None if row.perplexity is None else abs(math.log(row.perplexity / reference.perplexity))

    return [
        ("entries", lambda row: "all" if row.entries is None else f"{row.entries:,}", None),
        ("match\n%", lambda row: _percent(row.match), lambda row: _negative(row.match)),
        ("differs\nat", lambda row: "-" if row.differs_at is None else str(row.differs_at), None),
        ("KL\nmean", lambda row: nats(row.kl_mean), lambda row: row.kl_mean),
        ("KL\nmax", lambda row: nats(row.kl_max), None),
        ("top-1\n%", lambda row: _percent(row.top1), lambda row: _negative(row.top1)),
        ("perplexity", lambda row: "-" if row.perplexity is None else f"{row.perplexity:#.4g}".rstrip("."), surprise),
    ]


_RECALL: list[Column] = [
    (
        "recalled of\na head",
        lambda row: "-" if row.recalled is None else f"{row.recalled:,.0f} of {row.away:,.0f}",
        None,
    ),
    ("left out\nat most", lambda row: "-" if row.left_out is None else f"{row.left_out:.1%}", None),
]

_COST: list[Column] = [
    ("resident", lambda row: size(row.memory["resident_bytes"]), lambda row: row.memory["resident_bytes"]),
    ("compressed +\ncheckpoints", lambda row: size(_kept(row)) if _kept(row) else "-", None),
    ("prefill\ns", lambda row: _number(row.prefill_s, 2), None),
    ("tokens\n/s", lambda row: _number(row.tokens_per_s, 1), lambda row: _negative(row.tokens_per_s)),
]


def _table(comparison: Comparison, columns: Sequence[Column]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1), collapse_padding=True, pad_edge=False)
    names = [heading for heading, _, _ in _NAMED]
    for heading, _, _ in columns:
        justify: Literal["left", "right"] = "left" if heading in names else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading != "method")
    rows = [comparison.reference, *comparison.measured]
    for number, row in enumerate(rows):
        if number and row.budget != rows[number - 1].budget:
            table.add_row()
        peers = [peer for peer in comparison.measured if peer.budget == row.budget and row.budget is not None]
        table.add_row(*(_cell(row, peers, show, badness) for _, show, badness in columns))
    return table


def _cell(
    row: Row, peers: Sequence[Row], show: Callable[[Row], str], badness: Callable[[Row], float | None] | None
) -> str:
    """Return what stands in a cell, in bold where no other row of the same budget is better and one is worse."""
    text = show(row)
    if badness is None or row not in peers:
        return text
    values = {show(peer): value for peer in peers if (value := badness(peer)) is not None}
    best = min(values, key=lambda key: values[key], default=text)
    return f"[bold]{text}[/]" if text == best and len(values) > 1 else text


def nats(value: float | None) -> str:
    """Return a KL as a person reads it: 0 only where it is 0."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.3f}" if value >= 1e-2 else f"{value:.1e}"


def _kept(row: Row) -> int:
    return row.memory["compressed_bytes"] + sum(row.memory["checkpoint_bytes"].values())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _negative(value: float | None) -> float | None:
    return None if value is None else -value
