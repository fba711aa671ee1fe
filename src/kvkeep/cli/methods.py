"""``kvkeep methods``: what there is, and what each promises."""

from __future__ import annotations

from rich.table import Table

from kvkeep.cli import options
from kvkeep.cli.output import out, print_json


def methods(json: options.Json = False) -> None:
    """List the methods: who leaves, what becomes of it, how it comes back, and the promise."""
    from kvkeep.cache import STOCK
    from kvkeep.policies.methods import METHODS

    rows = [
        {
            "name": method.name,
            "class": str(method.exactness),
            "selector": method.selector,
            "fate": method.fate,
            "recall": method.recall,
            "options": list(method.options),
            "summary": method.summary,
            "source": method.source,
        }
        for method in METHODS.values()
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
    if json:
        print_json({"methods": rows})
        return
    table = Table(box=None, header_style="bold")
    for heading in ("method", "class", "who leaves", "what becomes of it", "how it comes back", "summary"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("name", "class", "selector", "fate", "recall", "summary")))
    out.print(table)
