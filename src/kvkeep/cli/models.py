"""``kvkeep models``: lists the embedded models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import note, out, print_json
from kvkeep.cli.startup import startup
from kvkeep.units import size


def models(
    fetch: Annotated[str | None, typer.Option(help="Download this model and prepare it for loading.")] = None,
    json: options.Json = False,
) -> None:
    """List the embedded models, and which of them are on this machine."""
    if fetch is not None:
        options.check_model(fetch)
    with startup():
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
        table.add_row(row.name, size(row.bytes_on_disk) if row.bytes_on_disk else "no", row.licence, row.description)
    out.print(table)
    note("Other models: a GGUF file, a folder with config.json, or a hub id (owner/name).")
