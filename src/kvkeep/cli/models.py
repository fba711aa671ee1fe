"""``kvkeep models``: lists the embedded models, and explains GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvkeep.budget import size
from kvkeep.cli import options
from kvkeep.cli.output import note, out, print_json
from kvkeep.cli.startup import startup
from kvkeep.errors import UsageError
from kvkeep.models.embedded import EMBEDDED, Embedded, gguf_path
from kvkeep.models.fetching import growing_path


def models(
    fetch: Annotated[str | None, typer.Option(help="Download this model.")] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Print the contents of a GGUF file or an embedded model, and how kvkeep uses them."
        ),
    ] = None,
    pre: options.Pre = None,
    json: options.Json = False,
) -> None:
    """List the embedded models, and which of them are on this machine; or explain a GGUF file."""
    if explain is not None and fetch is not None:
        raise UsageError("--explain fetches a model that has a name by itself; leave --fetch out.")
    if explain is not None:
        _explain(explain, pre, json=json)
        return
    if pre is not None:
        raise UsageError("--pre changes how a file is read; give it with --explain FILE.")
    if fetch is not None:
        options.check_model(fetch)
        with startup(fetch):
            from kvkeep.models.loading import load

            load(fetch, device="cpu", progress=note)

    if json:
        print_json({"models": [_row(model) for model in EMBEDDED.values()]})
        return
    table = Table(box=None, header_style="bold")
    for heading in ("model", "on this machine", "licence", "description"):
        table.add_column(heading, overflow="fold")
    for model in EMBEDDED.values():
        table.add_row(model.name, _here(model), model.licence, model.description)
    out.print(table)
    note("'kvkeep models --fetch MODEL' downloads one; other commands do so when they first need it.")
    note("'kvkeep models --explain FILE' prints the contents of a GGUF file, and how kvkeep uses them.")
    note("Other models: a GGUF file, a folder with config.json, or a hub id (owner/name).")


def _explain(name: str, pre: str | None, *, json: bool) -> None:
    options.check_model(name)
    with startup(name if name in EMBEDDED else None):
        from kvkeep.models.gguf.explain import explain

    file = gguf_path(EMBEDDED[name]) if name in EMBEDDED else Path(name).expanduser()
    if not file.is_file():
        raise UsageError(f"--explain takes a GGUF file or an embedded model, and '{name}' is neither.")
    found = explain(file.resolve(), pre)
    if json:
        print_json(found)
        return
    about = {"file": ", ".join(found["files"])}
    about["architecture"] = f"{found['architecture']} ({found['family']} in transformers)"
    for heading, facts in {"file": about, "tokenizer": found["tokenizer"], "config": found["config"]}.items():
        _rows((heading, ""), facts.items())
    _rows(("key", "value", "use"), [one.values() for one in found["keys"]])
    tensors = [one | {"shape": "x".join(map(str, one["shape"]))} for one in found["tensors"]]
    _rows(("tensor", "stored", "shape", "weight", "in memory"), [one.values() for one in tensors])


def _rows(headings: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(one)) for one in row))
    out.print(table)
    out.print()


def _row(model: Embedded) -> dict[str, Any]:
    path, growing = gguf_path(model), growing_path(model)
    return {
        "name": model.name,
        "description": model.description,
        "licence": model.licence,
        "fetched": path.is_file(),
        "path": str(path) if path.is_file() else None,
        "bytes_on_disk": sum(file.stat().st_size for file in (path, growing) if file.is_file()),
    }


def _here(model: Embedded) -> str:
    if (path := gguf_path(model)).is_file():
        return size(path.stat().st_size)
    return f"{'in part' if growing_path(model).exists() else 'no'} ({size(model.size)})"
