"""Compare receipts of several machines or paths, and write the tables of docs/verified.md.

    kvkeep prove --receipt --json -m MODEL > FILE     # once for each model and path
    python tools/receipts.py [--write] FILE...

Rows that are promised have to be the same in all files of a model; the program ends with exit code 1 where one is not,
or where any row was not computed, and writes nothing. A measured row that differs is written as "differs". Tables of
models without a file stay as they are.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

from kvkeep_lab.receipts import Receipt, ReceiptRow
from kvkeep_lab.studies.receipt import ReceiptStudy
from pydantic import TypeAdapter

PAGE = Path(__file__).parents[1] / "docs" / "verified.md"
TABLES = re.compile(r"(<!-- tables: tools/receipts.py -->\n)(.*?)(<!-- end of tables -->)", re.DOTALL)
DIFFERS = "differs"


def main() -> None:
    """Compare the files, and write the tables."""
    write = "--write" in sys.argv
    found = [json.loads(Path(name).read_text()) for name in sys.argv[1:] if name != "--write"]
    if not found:
        sys.exit(__doc__)
    models = groupby(sorted(found, key=_model), _model)
    tables = {name: _table(name, list(reports)) for name, reports in models}
    print("\n".join(tables.values()))
    if write:
        PAGE.write_text(updated(PAGE.read_text("utf-8"), tables), "utf-8")


def updated(page: str, tables: dict[str, str]) -> str:
    """Return the page with ``tables``, by model, in place of its own for these models."""

    def joined(match: re.Match[str]) -> str:
        sections = re.split(r"^(?=### )", match[2].strip("\n"), flags=re.MULTILINE)
        known = {section.split()[1]: f"{section.rstrip()}\n" for section in sections if section.startswith("### ")}
        both = known | tables
        return f"{match[1]}\n" + "\n".join(both[name] for name in sorted(both)) + f"\n{match[3]}"

    return TABLES.sub(joined, page)


def _model(report: dict[str, Any]) -> str:
    return str(report["machine"]["model"])


def _table(model: str, reports: list[dict[str, Any]]) -> str:
    adapter = TypeAdapter(Receipt)
    receipts = [adapter.validate_python(_without_sums(report["receipt"])) for report in reports]
    if len({(one.fingerprint, one.numerics, one.prompts) for one in receipts}) > 1:
        sys.exit(f"{model}: the files are not of the same weights, numerics version and prompts.")
    if len({tuple(row.label for row in one.rows) for one in receipts}) > 1:
        sys.exit(f"{model}: the files have other rows.")
    merged = replace(receipts[0], rows=[_merged(model, rows) for rows in zip(*(r.rows for r in receipts), strict=True)])
    differing = [row.label for row in merged.rows if DIFFERS in (row.logits, row.session)]
    (table,) = ReceiptStudy.model_validate({}).tables(receipts[0] if not differing else merged)
    if differing:
        table.title = f"Receipt {receipts[0].exact[:16]} (exact)"
    digests = re.sub("^Receipt ", "", table.title)
    machines = (f"`{one['machine']['path']}` on {one['machine']['processor']}" for one in reports)
    same = "All rows are the same."
    if differing:
        same = f"Different: {', '.join(differing)}."
    elif len(reports) == 1:
        same = "Not yet compared with another path or machine."
    table.title = model
    lines = table.markdown().replace(f"### {model}\n", f"### {model}\n\nReceipt: {digests}.\n", 1)
    torch = ", ".join(sorted({one["machine"]["torch"] for one in reports}))
    return f"{lines}\n\nComputed {date.today()} by {', '.join(machines)}, torch {torch}. {same}\n"


def _merged(model: str, rows: tuple[ReceiptRow, ...]) -> ReceiptRow:
    """Return the row of all files; ends the program where a promised one differs."""
    first = rows[0]
    for row in rows:
        if row.error or not row.logits:
            sys.exit(f"{model}: '{row.label}' was not computed: {row.error or 'it has no digest'}")
    if all((row.logits, row.session) == (first.logits, first.session) for row in rows):
        return first
    if first.promised:
        sys.exit(f"{model}: '{first.label}' is promised to be the same everywhere, and is not.")
    logits, session = (
        digests.pop() if len(digests) == 1 else DIFFERS
        for digests in ({row.logits for row in rows}, {row.session for row in rows})
    )
    return replace(first, logits=logits, session=session)


def _without_sums(receipt: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in receipt.items() if name not in ("exact", "all")}


if __name__ == "__main__":
    main()
