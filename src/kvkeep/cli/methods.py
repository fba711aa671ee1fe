"""``kvkeep methods``: what there is, and what each promises."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import out, print_json


def methods(json: options.Json = False) -> None:
    """List the methods: who leaves, what becomes of it, how it comes back, and the promise."""
    from kvkeep.policies.methods import STOCK, parts
    from kvkeep.policies.methods import methods as registered
    from kvkeep.policies.specs import parameters

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
    rows.append(
        {
            "name": STOCK,
            "class": "exact",
            "selector": "nobody",
            "fate": "kept",
            "recall": "not needed",
            "options": [],
            "summary": "transformers' own default cache, the yardstick.",
            "source": "transformers.DynamicCache",
        }
    )
    known = {kind: {name: parameters(made) for name, made in registry.items()} for kind, registry in parts().items()}
    if json:
        defaults = {
            kind: {name: {key: _plain(value) for key, value in given.items()} for name, given in own.items()}
            for kind, own in known.items()
        }
        print_json({"methods": rows, **defaults})
        return
    table = Table(box=None, header_style="bold")
    for heading in ("method", "class", "who leaves", "what becomes of it", "how it comes back"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("name", "class", "selector", "fate", "recall")))
    out.print(table)
    out.print(
        "\nAny SELECTOR+FATE+RECALL is a method, too; a fate or a recall may be left out, and each may have parameters:"
    )
    out.print("snapkv:window=16+quantize:4, h2o+verified, snapkv+pages:4")
    for kind, own in known.items():
        listed = Table(box=None, header_style="bold")
        listed.add_column(kind)
        listed.add_column("parameters", overflow="fold")
        for name, given in own.items():
            listed.add_row(
                name, ", ".join(key if _plain(value) is None else f"{key}={value}" for key, value in given.items())
            )
        out.print(listed)


def _plain(value: Any) -> Any:
    """Return a default as JSON has it; None where there is none."""
    return None if value is MISSING or value == "" else value
