"""``kvkeep verify``: the claims, checked on your own model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import err, note, out, print_json
from kvkeep.errors import Interrupted

if TYPE_CHECKING:
    from kvkeep_lab.reconstruction import Difference
    from kvkeep_lab.verify import Report
    from kvkeep_lab.windows import Windows

_TABLE_1 = (("SmolLM2-135M", "22.5 KiB", "1.1 KiB", "20.0"), ("Gemma 3 4B", "136.0 KiB", "5.0 KiB", "27.2"))


def verify(
    model: options.Model = "smollm2",
    dtype: options.Dtype = "float32",
    quick: Annotated[
        bool, typer.Option("--quick", help="One length, one dtype, fewer tokens, no decoding from tokens.")
    ] = False,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Rebuild keys and values and compare; decode with and without a cache; patch residuals; count bytes."""
    from kvkeep.models.loading import load
    from kvkeep_lab.verify import verify as run

    loaded = load(model, dtype=dtype, device=device, progress=note)
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
    for part in (_sizes, _rebuilt, _tokens, _patched, _bytes):
        out.print(part(report))
        out.print()
    for line in _beyond(report.windows) if report.windows is not None else ():
        out.print(line)
    for kind, reason in report.refused.items():
        out.print(f"[yellow]Not checked:[/] checkpoint kind {kind}. {reason}")
    failures = len(report.failures())
    out.print(
        f"[bold red]{failures} measurements contradict a claim.[/]" if failures else "[bold green]Every claim held.[/]"
    )


def _sizes(report: Report) -> Table:
    table = _table("Bytes a token (Table 1)", "", "keys and values", "one residual", "rho")
    mine = (f"{report.kv_bytes / 1024:.1f} KiB", f"{report.residual_bytes / 1024:.1f} KiB", f"{report.rho:.1f}")
    table.add_row(f"{report.model}, {report.dtype}", *mine)
    for name, *figures in _TABLE_1:
        table.add_row(f"paper: {name}, bfloat16", *figures, style="dim")
    return table


def _rebuilt(report: Report) -> Table:
    table = _table(
        "Rebuilt against cached: max |dK| and |dV| (Table 2)",
        "dtype",
        "layers",
        "tokens",
        "same shapes",
        "by pages",
        "by single rows",
        "",
    )
    for row in report.reconstruction:
        parts = (_pair(part) for part in (row.same, row.pages, row.rows))
        table.add_row(row.dtype, f"{len(row.layers)} {row.kind}", str(row.length), *parts, _mark(row.holds))
    table.add_row("paper: SmolLM2", "30 full", "16-256", "0 0", style="dim")
    table.add_row("paper: Gemma 3 4B", "5 full", "16-256", "0 0", style="dim")
    table.add_row("paper: Gemma 3 4B", "29 sliding", "16-256", ">0 0", style="dim")
    return table


def _tokens(report: Report) -> Table:
    table = _table("Greedy tokens (Table 3)", "", "same", "seconds", "x", "")
    for way in report.tokens:
        mark = _mark(way.holds)
        if way.gap is not None:
            mark += f" at token {way.differs_at}, {way.gap:.1g} logits apart"
        table.add_row(way.way, f"{way.matching}/{way.of}", f"{way.seconds:.2f}", f"{way.ratio:.1f}", mark)
    table.add_row("paper: SmolLM2, no cache", "30/30", "0.19", "1.7", style="dim")
    table.add_row("paper: Gemma 3 4B, no cache", "30/30", "3.14", "3.8", style="dim")
    return table


def _patched(report: Report) -> str:
    claimed = [row for row in report.patching if not row.also_reads]
    lines = []
    if claimed:
        worst = max(claimed, key=lambda row: abs(row.kl))
        lines.append(
            f"[bold]Residual patching (Fig. 8)[/]: largest KL at {len(claimed)} layers {worst.kl:.2g} "
            f"{_mark(all(row.holds for row in claimed))}  [dim]paper: 0 at all 30 layers of SmolLM2[/]"
        )
    others = [row for row in report.patching if row.also_reads]
    if others:
        worst = max(others, key=lambda row: abs(row.kl))
        lines.append(
            f"[bold]Residual patching[/]: {len(others)} layers are followed by some that also read "
            f"{worst.also_reads}, so the residual is not the whole state; KL up to {worst.kl:.2g}"
        )
    return "\n".join(lines)


def _bytes(report: Report) -> Table:
    headings = ("T", "B", "stock cache", "Eq. 28", "predicted", "used", "allocated", "")
    table = _table(
        "Bytes held after T tokens within B entries (Eq. 28: one vector an evicted token)", "kind", *headings
    )
    for row in report.memory:
        figures = (row.tokens, row.entries, row.stock, row.paper, row.predicted, row.used, row.allocated)
        table.add_row(row.kind, *(f"{number:,}" for number in figures), _mark(row.holds))
    table.caption = (
        "predicted: B entries, and what this kind keeps for T - B (kv) or all T tokens (residual: a vector for each "
        "full layer; tokens: an id); allocated: in pages of 256 to 1024 rows"
    )
    table.caption_justify = "left"
    return table


def _beyond(windows: Windows) -> Iterator[str]:
    yield f"[bold]Beyond the window[/] ({windows.text_tokens} tokens, window {windows.window}):"
    yield (
        f"  rebuilt at absolute positions against what the window holds: {_pair(windows.held)} "
        f"{_mark(windows.held.none)}  [dim]paper: |dK| > 0[/]"
    )
    for kind, matching in windows.matching.items():
        yield f"  kv-direct from {kind}: {matching}/{windows.of} tokens {_mark(matching == windows.of)}"
    yield (
        f"  the paper's recompute, without a window: {windows.blind_matching}/{windows.of} tokens, "
        f"|dK| |dV| {_pair(windows.blind)}, logits off by {windows.blind_logits:.2g}  "
        "[dim]paper, 5.4: HellaSwag 49.2 to 25.0[/]"
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right")
    return table


def _pair(found: Difference) -> str:
    return f"{found.keys:.2g} {found.values:.2g}"


def _mark(holds: bool) -> str:
    return "[green]ok[/]" if holds else "[red]FAILED[/]"
