"""``kvkeep methods --for NEED``: the methods that were measured for a need, the best first."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from rich.table import Table

from kvkeep.cli.output import out, print_json, show
from kvkeep.errors import UsageError, unknown

NEEDS = {
    "needles": "facts that are asked for after the text was read (the method does not know the question)",
    "known-question": "facts that the prompt itself asks for (the method reads the question with the text)",
}


def measured() -> dict[str, Any]:
    """Return the measured table, which ``tools/which_method.py`` makes from a store of the lab."""
    text = resources.files("kvkeep.policies").joinpath("measured.json").read_text("utf-8")
    return dict(json.loads(text))


def print_recommended(need: str, budget: str | None, as_json: bool) -> None:
    """Print the methods measured for ``need`` at each budget, or at one, the best first. Raises UsageError for an
    unknown need, and for a budget that was not measured."""
    if need not in NEEDS:
        raise unknown("need", need, list(NEEDS))
    found = measured()
    rows = [row for row in found["rows"] if row["need"] == need]
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    if not rows:
        raise UsageError(f"No method has been measured for '{need}' yet; measure yours with 'kvkeep compare'.")
    if budget is not None and budget not in budgets:
        raise UsageError(
            f"A budget of {budget} was not measured for '{need}', only {' and '.join(budgets)}; measure yours with "
            "'kvkeep compare'."
        )
    chosen = sorted(
        (row for row in rows if budget in (None, row["budget"])),
        key=lambda row: (budgets.index(row["budget"]), -row["match"][0], -row["loglik"][0]),
    )
    if as_json:
        print_json({**found, "rows": chosen})
        return
    out.print(
        f"For {NEEDS[need]}. 'kv-direct' answers as 'full' does at every budget: it keeps evicted entries on disk and "
        "reads them again. If they may be lost:"
    )
    for one in dict.fromkeys(row["budget"] for row in chosen):
        table = Table(box=None, header_style="bold")
        for heading in (f"at {one}", "found", "ln p a token", "bytes", "N"):
            table.add_column(heading, justify="left" if heading.startswith("at") else "right")
        for row in (row for row in chosen if row["budget"] == one):
            share = f"{row['bytes']:.1%}"
            table.add_row(row["method"], _share(row["match"]), _number(row["loglik"]), share, str(row["n"]))
        show(table)
    best = next(row for row in chosen if row["method"] != "full")
    out.print(f"The first of those that drop entries: kvkeep generate -x {best['method']} -b {best['budget']}")
    texts = max(row["texts"] for row in chosen)
    out.print(
        "found: the share of the answers written right; in brackets 95 % intervals. bytes: with bookkeeping, of the "
        f"full cache's in bfloat16. Measured with {found['model']}, {texts} text{'s' if texts > 1 else ''} of "
        f"{found['tokens']:,} tokens; other models and texts may differ: 'kvkeep compare' measures yours. Store: "
        f"{found['store']}."
    )


def _share(estimate: list[float]) -> str:
    mean, low, high = (f"{100 * value:.0f}" for value in estimate)
    return f"{mean} % [{low}, {high}]"


def _number(estimate: list[float]) -> str:
    mean, low, high = (f"{value:.2f}" for value in estimate)
    return f"{mean} [{low}, {high}]"
