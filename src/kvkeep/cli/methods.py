"""``kvkeep methods``: lists all methods and parts, or describes one."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvkeep.cli import options
from kvkeep.cli.options import split_list
from kvkeep.cli.output import out, print_json, show
from kvkeep.cli.startup import startup
from kvkeep.errors import UsageError
from kvkeep.policies.names import STOCK

if TYPE_CHECKING:
    from kvkeep.policies.registry import Method


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="METHOD", help="A method to describe; without one, all are listed.", show_default=False),
    ] = None,
    bibtex: Annotated[
        str | None,
        typer.Option(
            metavar="METHODS",
            help="Print the papers of methods, separated by commas, as BibTeX; all: of every named method.",
            autocompletion=options.complete_methods,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the methods: what they evict, store and recall, and how exact they are. Or describe one."""
    if bibtex is not None:
        if json or name is not None:
            raise UsageError("--bibtex prints papers only; leave METHOD and --json out.")
        typer.echo(_bibtex(bibtex))
        return
    if name is not None:
        _describe(name, json)
        return
    found = _registered()
    if json:
        print_json(found)
        return
    rows = found.pop("methods")
    for promise, meaning in _PROMISES.items():
        out.print(f"[bold]{promise}[/]: {meaning}")
        _print(
            [list(_LISTED.values()), *([_mark(row[key]) for key in _LISTED] for row in rows if row["class"] == promise)]
        )
        out.print()
    out.print(
        f"* Start with {START}: its answers are exact, and evicted entries are kept on disk.\n'kvkeep methods METHOD' "
        "describes one.\nSELECTOR+FATE+RECALL is a method, too. Fate and recall are optional, and each part takes "
        "parameters:\nsnapkv:window=16+quantize:4, h2o+verified\nA name that ends in +oneshot reads "
        "the whole prompt first and compresses it afterwards: h2o+oneshot"
    )
    for kind, registry in found.items():
        out.print()
        _print([[kind, "parameters"], *([name, given(parameters)] for name, parameters in registry.items())])


def _describe(name: str, json: bool) -> None:
    """Print what one method does, its options and parameters, and where it comes from."""
    with startup():
        from kvkeep.policies.methods import resolve

    row, taken = _STOCK_ROW, dict[str, dict[str, Any]]()
    if name != STOCK:
        method = resolve(name)
        made: dict[str, Any] = {"selector": method.selector, "fate": method.fate, "recall": method.recall}
        for kind, part in made.items():
            taken[kind] = {one.name: plain(getattr(part, one.name)) for one in fields(part)}
        row = _row(method)
    if json:
        print_json(row | {"parameters": taken})
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for key, heading in (COLUMNS | {"options": "options", "summary": "about", "source": "source"}).items():
        value = ", ".join(row[key]) if isinstance(row[key], list) else row[key]
        table.add_row(Text(heading, "bold"), Text(value or "-"))
    for kind, values in taken.items():
        if values:
            table.add_row(Text(f"{kind} takes", "bold"), Text(given(values)))
    out.print(table)
    out.print(f"[bold]{row['class']}[/]: {_PROMISES[row['class']]}")


def _registered() -> dict[str, Any]:
    """Return all named methods, and all parts with their parameters."""
    with startup():
        from kvkeep.policies.methods import parts
        from kvkeep.policies.specs import parameters

    defaults = {
        kind: {name: {key: plain(value) for key, value in parameters(made).items()} for name, made in registry.items()}
        for kind, registry in parts().items()
    }
    return {"methods": rows_of_methods(), **defaults}


def _bibtex(given: str) -> str:
    """Return the papers of methods as BibTeX, with a comment for each method without a paper."""
    from kvkeep.policies.methods import methods as registered
    from kvkeep.policies.methods import resolve
    from kvkeep.policies.papers import papers_of

    names = split_list([given], "--bibtex")
    chosen = list(registered().values()) if names == ["all"] else [resolve(name) for name in names]
    bare = [f"% {method.name}: {method.source or 'no paper'}" for method in chosen if not papers_of([method])]
    return "\n\n".join([*(paper.bibtex() for paper in papers_of(chosen)), *bare])


START = "kv-direct"
"""The recommended first method."""
_PROMISES = {
    "exact": "every token is the same as with the unbounded cache",
    "reversible": "evicted entries can come back, approximately",
    "lossy": "evicted entries are lost, or are read approximately",
}


def _mark(text: str) -> str:
    return f"{text} *" if text == START else text


COLUMNS = {
    "name": "method",
    "class": "exactness",
    "selector": "evicts",
    "fate": "evicted entries are",
    "recall": "recalled",
}
_LISTED = {key: heading for key, heading in COLUMNS.items() if key != "class"}


def rows_of_methods() -> list[dict[str, Any]]:
    """Return a row of fields for each named method."""
    from kvkeep.policies.methods import methods as registered

    return [*map(_row, registered().values()), _STOCK_ROW]


def _row(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "class": str(method.exactness),
        "selector": method.leaves,
        "fate": method.becomes,
        "recall": method.returns,
        "options": list(method.options),
        "summary": method.summary,
        "source": method.source,
    }


_STOCK_ROW: dict[str, Any] = {
    "name": STOCK,
    "class": "exact",
    "selector": "none",
    "fate": "kept",
    "recall": "not needed",
    "options": [],
    "summary": "transformers' own default cache, the baseline.",
    "source": "transformers.DynamicCache",
}


def given(parameters: dict[str, Any]) -> str:
    """Return parameters with their default values as text."""
    return ", ".join(key if value is None else f"{key}={value}" for key, value in parameters.items())


def _print(rows: list[list[str]]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows[1:]:
        table.add_row(*row)
    show(table)


def plain(value: Any) -> Any:
    """Return a default value for JSON; None if there is no default."""
    return None if value is MISSING or value == "" else value
