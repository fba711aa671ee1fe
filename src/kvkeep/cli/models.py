"""``kvkeep models``: lists the embedded models."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import note, out, print_json
from kvkeep.cli.startup import startup
from kvkeep.models.embedded import EMBEDDED
from kvkeep.models.fetching import growing_path
from kvkeep.units import size

if TYPE_CHECKING:
    from kvkeep.models.loading import AvailableModel


def models(
    fetch: Annotated[str | None, typer.Option(help="Download this model and prepare it for loading.")] = None,
    json: options.Json = False,
) -> None:
    """List the embedded models, and which of them are on this machine."""
    if fetch is not None:
        options.check_model(fetch)
    with startup(fetch):
        from kvkeep.models.loading import available, load

        if fetch is not None:
            load(fetch, device="cpu", progress=note)

    rows = available()
    if json:
        print_json({"models": [asdict(row) | {"path": str(row.path) if row.path else None} for row in rows]})
        return
    table = Table(box=None, header_style="bold")
    for heading in ("model", "on this machine", "licence", "description"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.name, _here(row), row.licence, row.description)
    out.print(table)
    note("'kvkeep models --fetch MODEL' downloads one; other commands do so when they first need it.")
    note("Other models: a GGUF file, a folder with config.json, or a hub id (owner/name).")


def _here(row: AvailableModel) -> str:
    if row.fetched:
        return size(row.bytes_on_disk)
    model = EMBEDDED[row.name]
    return f"{'in part' if growing_path(model).exists() else 'no'} ({size(model.size)})"
