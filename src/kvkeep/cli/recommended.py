"""``kvkeep methods --for NEED``: the methods that were measured for a need, the best first."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from rich.table import Table

from kvkeep.budget import Budget
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
    chosen_budgets = budgets if budget is None else [one for one in budgets if _same(one, budget)]
    if not chosen_budgets:
        raise UsageError(
            f"A budget of {budget} was not measured for '{need}', only {' and '.join(budgets)}; 'kvkeep compare' "
            "measures how far from the full cache a method is on your text at yours."
        )
    chosen = sorted(
        (row for row in rows if row["budget"] in chosen_budgets),
        key=lambda row: (budgets.index(row["budget"]), -row["match"][0], -row["loglik"][0]),
    )
    if as_json:
        print_json({**found, "rows": chosen})
        return
    out.print(
        f"For {NEEDS[need]}. 'kv-direct' answers as 'full' does at every budget: it keeps evicted entries on disk and "
        "reads them again. If they may be lost:"
    )
    for one in chosen_budgets:
        table = Table(box=None, header_style="bold")
        for heading in (f"at {one}", "found", "ln p a token", "bytes"):
            table.add_column(heading, justify="left" if heading.startswith("at") else "right")
        for row in (row for row in chosen if row["budget"] == one):
            share = f"{row['bytes']:.1%}"
            table.add_row(row["method"], _share(row["match"]), _number(row["loglik"]), share)
        show(table)
    for one in chosen_budgets:
        best = next(row for row in chosen if row["method"] != "full" and row["budget"] == one)
        out.print(f"The first of those that drop entries: kvkeep generate -x {best['method']} -b {one}")
    if need == "known-question":
        out.print("+oneshot: the prompt is read as a whole, in a full cache, before entries are dropped.")
    row = chosen[0]
    out.print(
        "found: the share of the answers written right; in brackets 95 % intervals over texts. bytes: with "
        f"bookkeeping, of the full cache's in bfloat16. Measured with {found['model']}: {row['n']} facts in "
        f"{row['texts']} texts of {found['tokens']:,} tokens ({', '.join(found['kinds'])}), the same at each budget. "
        "Other models and texts may differ: 'kvkeep compare' measures how far from the full cache a method is on "
        f"yours. Store: {found['store']}."
    )


def _same(one: str, other: str) -> bool:
    mine, given = Budget.parse(one), Budget.parse(other)
    return (mine.unit, mine.amount) == (given.unit, given.amount)


def _share(estimate: list[float]) -> str:
    mean, low, high = (f"{100 * value:.0f}" for value in estimate)
    return f"{mean} % [{low}, {high}]"


def _number(estimate: list[float]) -> str:
    mean, low, high = (f"{value:.2f}" for value in estimate)
    return f"{mean} [{low}, {high}]"
