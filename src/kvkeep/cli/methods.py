"""``kvkeep methods``: lists all methods, parts and combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from kvkeep.cli import completion, options
from kvkeep.cli.options import split_list
from kvkeep.cli.output import out, print_json, show
from kvkeep.cli.recommended import NEEDS, print_recommended
from kvkeep.cli.registry_cache import cached
from kvkeep.cli.startup import startup
from kvkeep.errors import UsageError, unknown
from kvkeep.plugins import PARTS, points
from kvkeep.policies.names import LAB

Rows = list[list[str]]  # the first row holds the headings


def methods(
    json: options.Json = False,
    table: Annotated[
        str | None,
        typer.Option(help="Print one table as Markdown: methods, selectors, fates, recalls, or combinations."),
    ] = None,
    bibtex: Annotated[
        str | None,
        typer.Option(
            metavar="METHODS",
            help="Print the papers of methods, separated by commas, as BibTeX; all: of every named method.",
            autocompletion=completion.methods,
        ),
    ] = None,
    need: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="NEED", help=f"Print the methods that were measured for a need: {', '.join(NEEDS)}."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", help="With --for: at this budget only, such as 25%.")
    ] = None,
) -> None:
    """List the methods: what they evict, store and recall, and how exact they are."""
    if budget is not None and need is None:
        raise UsageError("--budget chooses rows of --for; give both, or leave it out.")
    if need is not None:
        if bibtex is not None or table is not None:
            raise UsageError("--for prints a table of its own; leave --table and --bibtex out.")
        print_recommended(need, budget, json)
        return
    if json and (bibtex is not None or table is not None):
        raise UsageError("--json prints the list of methods only; leave it out with --table and --bibtex.")
    if bibtex is not None:
        typer.echo(_bibtex(bibtex))
        return
    if table is not None:
        if (made := TABLES.get(table)) is None:
            raise unknown("table", table, list(TABLES))
        typer.echo(_markdown(made()))
        return
    # With plugins the list is rebuilt on each call, so that warnings about a broken package are printed.
    plugins = any(point.name not in LAB for point in points(PARTS))
    found = _registered() if plugins else cached("methods", _registered)
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
        f"* Start with {START}: its answers are exact, and evicted entries are kept on disk.\nSELECTOR+FATE+RECALL "
        "is a method, too. Fate and recall are optional, and each part takes "
        "parameters:\nsnapkv:window=16+quantize:4, h2o+verified\nA name that ends in +oneshot reads "
        "the whole prompt first and compresses it afterwards: h2o+oneshot\n'kvkeep methods --table combinations' "
        "lists all combinations, and why some are refused."
    )
    for kind, registry in found.items():
        out.print()
        _print([[kind, "parameters"], *([name, _given(parameters)] for name, parameters in registry.items())])


def _registered() -> dict[str, Any]:
    """Return all named methods, and all parts with their parameters."""
    with startup():
        from kvkeep.policies.methods import parts
        from kvkeep.policies.specs import parameters

    defaults = {
        kind: {name: {key: _plain(value) for key, value in parameters(made).items()} for name, made in registry.items()}
        for kind, registry in parts().items()
    }
    return {"methods": _rows(), **defaults}


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


_COLUMNS = {
    "name": "method",
    "class": "exactness",
    "selector": "evicts",
    "fate": "evicted entries are",
    "recall": "recalled",
}
_LISTED = {key: heading for key, heading in _COLUMNS.items() if key != "class"}


def _rows() -> list[dict[str, Any]]:
    """Return a row of fields for each named method."""
    from kvkeep.policies.methods import STOCK
    from kvkeep.policies.methods import methods as registered

    rows = [
        {
            "name": method.name,
            "class": str(method.exactness),
            "selector": method.leaves,
            "fate": method.becomes,
            "recall": method.returns,
            "options": list(method.options),
            "summary": method.summary,
            "source": method.source,
        }
        for method in registered().values()
    ]
    stock = {
        "name": STOCK,
        "class": "exact",
        "selector": "none",
        "fate": "kept",
        "recall": "not needed",
        "options": [],
        "summary": "transformers' own default cache, the baseline.",
        "source": "transformers.DynamicCache",
    }
    return [*rows, stock]


def _methods() -> Rows:
    """Return rows for the named methods, except plain selectors."""
    from kvkeep.policies.methods import parts

    columns = _COLUMNS | {"source": "source"}
    rows = ({**row, "name": _code(row["name"])} for row in _rows() if row["name"] not in parts()["selectors"])
    return [list(columns.values()), *([row[key] for key in columns] for row in rows)]


_PARTS = {
    "selectors": {"leaves": "evicts"},
    "fates": {"label": "evicted entries are", "returns": "recalled, without a recall"},
    "recalls": {"label": "recalled"},
}


def _parts(kind: str) -> Rows:
    """Return rows for the selectors, fates or recalls, with their former names."""
    from kvkeep.policies.methods import parts
    from kvkeep.policies.registry import FORMER

    rows = [[kind.removesuffix("s"), *_PARTS[kind].values(), "parameters", "source"]]
    for name, made in parts()[kind].items():
        called = [_code(name), *(f"(also {_code(former)})" for former, current in FORMER.items() if current == name)]
        about = (getattr(made, key) for key in _PARTS[kind])
        rows.append([" ".join(called), *about, _code(_parameters(made)), made.source])
    return rows


def _combinations() -> Rows:
    """Return a row for each fate: its selectors, and the exactness without a recall and with each recall.

    Parts have default parameters, and those of a preset if they change the row. Numbered reasons for refusals follow.
    """
    from kvkeep.policies.methods import combined, parts
    from kvkeep.policies.recalls.evicted import Evicted
    from kvkeep.policies.registry import PRESETS
    from kvkeep.policies.specs import required

    selectors, fates, recalls = (
        {name: made() for name, made in registry.items() if not required(made)} for registry in parts().values()
    )
    names = {type(fate): name for name, fate in fates.items()}
    for preset in PRESETS.values():
        given = ",".join(f"{key}={value}" for key, value in preset.defaults.items())
        if given and preset.fate in names:  # a preset's fate may have no name
            fates[f"{names[preset.fate]}:{given}"] = preset.fate(**preset.defaults)
    reasons: list[str] = []

    def answer(selector: Any, fate: Any, recall: Any) -> str:
        method = combined("", selector, fate, recall)
        if (reason := method.refusal()) is None:
            return str(method.exactness)
        if reason not in reasons:
            reasons.append(reason)
        return f"no [{reasons.index(reason) + 1}]"

    rows: dict[str, list[str]] = {}
    for name, fate in fates.items():
        plain = {key: answer(selector, fate, Evicted()) for key, selector in selectors.items()}
        refused = [key for key, text in plain.items() if text.startswith("no")]
        accepted = [key for key in selectors if key not in refused]
        which = "all"
        if refused:
            which = f"all but {_listed(refused)}" if len(refused) < len(accepted) else f"only {_listed(accepted)}"
            which += f" [{', '.join(dict.fromkeys(plain[key].strip('no []') for key in refused))}]"
        row = [which, _distinct(plain[key] for key in accepted)]
        row += [_distinct(answer(selectors[key], fate, recall) for key in accepted) for recall in recalls.values()]
        if rows.get(name.partition(":")[0]) != row:
            rows[name] = row
    heading = ["fate", "selectors", "alone", *(f"+{name}" for name in recalls)]
    table = [heading, *([_code(name), *row] for name, row in rows.items())]
    return [*table, *([f"[{number}] {reason}"] for number, reason in enumerate(reasons, 1))]


TABLES: dict[str, Callable[[], Rows]] = {
    "methods": _methods,
    **{kind: partial(_parts, kind) for kind in _PARTS},
    "combinations": _combinations,
}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(_code(name) for name in names)


def _distinct(answers: Any) -> str:
    return ", ".join(dict.fromkeys(answers)) or "-"


def _parameters(made: type[Any]) -> str:
    from kvkeep.policies.specs import parameters

    return _given({key: _plain(value) for key, value in parameters(made).items()})


def _given(given: dict[str, Any]) -> str:
    return ", ".join(key if value is None else f"{key}={value}" for key, value in given.items())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _markdown(rows: Rows) -> str:
    """Return rows as a Markdown table; rows with one cell become a list below it."""
    lines = [f"| {' | '.join(row)} |" for row in rows if len(row) > 1]
    lines.insert(1, "| " + " | ".join("---" for _ in rows[0]) + " |")
    notes = [f"* {row[0]}" for row in rows if len(row) == 1]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _print(rows: Rows) -> None:
    table = Table(box=None, header_style="bold")
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows[1:]:
        table.add_row(*row)
    show(table)


def _plain(value: Any) -> Any:
    """Return a default value for JSON; None if there is no default."""
    return None if value is MISSING or value == "" else value
