"""``kvkeep verify``: the claims, checked on your own model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, note, out, print_json
from kvkeep.errors import Interrupted

if TYPE_CHECKING:
    from kvkeep.lab.verify import Report


def verify(
    model: options.Model = "smollm2",
    quick: Annotated[bool, typer.Option("--quick", help="One length, float32, two checkpoint kinds.")] = False,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Rebuild keys and values and compare; decode with and without a cache; patch residuals; count bytes."""
    from kvkeep.lab.verify import verify as run
    from kvkeep.models.loading import load

    loaded = load(model, device=device, progress=note)
    try:
        with err.status("verifying") as status:
            report = run(loaded.model, loaded.tokenizer, loaded.name, quick=quick, progress=status.update)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted; nothing was verified to the end.") from None
    if json:
        print_json(report.as_dict())
    else:
        show(report)
    if not report.holds:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """Print the tables, the paper's numbers beside them."""
    out.print(
        f"[bold]{report.model}[/bold]: {report.kv_bytes / 1024:.1f} KiB of keys and values a token, "
        f"{report.residual_bytes / 1024:.2f} KiB for one residual, rho = {report.rho:.1f}  "
        "[dim](Table 1, in 2-byte elements: SmolLM2 22.5, 1.1, 20.0; Gemma 3 4B 136, 5.0, 27.2)[/dim]"
    )
    table = _table(
        "Rebuilt against cached (Table 2: 0 in full layers; keys > 0 in Gemma's sliding layers)",
        "dtype",
        "tokens",
        "layers",
        "max |dK|",
        "max |dV|",
        "|dK| by single rows",
        "|dV| by single rows",
        "",
    )
    for row in report.reconstruction:
        table.add_row(
            row.dtype,
            str(row.length),
            f"{row.layers} {row.kind}",
            f"{row.same_keys:.2g}",
            f"{row.same_values:.2g}",
            _small(row.rows_keys),
            _small(row.rows_values),
            _mark(row.holds),
        )
    out.print(table)
    table = _table("Greedy tokens (Table 3: 30/30; without a cache 1.7-3.8 x slower)", "", "tokens", "seconds", "x", "")
    for way in report.tokens:
        table.add_row(way.way, f"{way.matching}/{way.of}", f"{way.seconds:.2f}", f"{way.ratio:.1f}", _mark(way.holds))
    out.print(table)
    worst = max(report.patching, key=lambda row: abs(row.kl))
    out.print(
        f"Residual patching at {len(report.patching)} layers (Fig. 8: KL = 0 at every layer): "
        f"largest |KL| {abs(worst.kl):.2g} at layer {worst.layer} {_mark(all(row.holds for row in report.patching))}"
    )
    table = _table(
        "Bytes (Eq. 28 charges one vector for each evicted token)",
        "kind",
        "tokens",
        "budget",
        "Eq. 28",
        "predicted",
        "used",
        "allocated",
        "",
    )
    for kept in report.memory:
        table.add_row(
            kept.kind,
            *(
                f"{number:,}"
                for number in (kept.tokens, kept.entries, kept.paper, kept.predicted, kept.used, kept.allocated)
            ),
            _mark(kept.holds),
        )
    out.print(table)
    if (windows := report.windows) is not None:
        out.print(
            f"Beyond the window ({windows.text_tokens} tokens, window {windows.window}): kv-direct from tokens "
            f"{windows.matching}/{windows.of} {_mark(windows.holds)}; the paper's recompute without a window "
            f"{windows.matching_without_window}/{windows.of} (its section 5.4: HellaSwag 49.2 -> 25.0)"
        )
    out.print("[bold green]Every claim held.[/]" if report.holds else "[bold red]A claim did not hold.[/]")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right")
    return table


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _mark(holds: bool) -> str:
    return "[green]ok[/]" if holds else "[red]FAILED[/]"
