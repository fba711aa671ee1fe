"""``prove --receipt``: digests of logits, tokens and saved sessions, for comparison with those of another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from kvkeep.errors import UsageError
from kvkeep_lab.partial import keeping
from kvkeep_lab.receipts import CASES, SHOWN, Receipt, check_library, prompts, rows, start, text
from kvkeep_lab.studies.base import OwnMethod, Study, Trial, text_of
from kvkeep_lab.tables import Table


class ReceiptStudy(Study):
    """The digests of a model, for fixed prompts and budgets."""

    name = "receipt"
    about = "digests of logits, tokens and saved sessions, equal on every processor"
    protocol = (
        "Two fixed prompts are answered greedily by fixed methods with fixed budgets; logits, tokens and the saved "
        "sessions are hashed by SHA-256."
    )
    found = Receipt
    text = "optional"
    weights = "auto"

    methods: list[OwnMethod] = Field([], description="methods of the receipt; by default all of them")
    markdown: bool = Field(False, description="print the table as Markdown")

    def check(self, files: Sequence[Path]) -> None:
        """Raise UsageError without the native library, and for methods that receipts do not cover."""
        check_library()
        known = list(dict.fromkeys(case.method for case in CASES))
        for method in self.methods:
            if method not in known:
                raise UsageError(f"A receipt has no row for '{method}'; it has rows for {', '.join(known)}.")

    def measure(self, trial: Trial) -> Receipt:
        """Answer the prompts with each method."""
        given = prompts(trial.loaded, text_of(trial.sources) if trial.sources else text())
        cases = [case for case in CASES if not self.methods or case.method in self.methods]
        found = start(trial.loaded, given)
        with keeping(found, found.rows):
            for row in rows(trial.loaded, cases, given, lambda label, done: trial.progress(label, done, len(cases))):
                found.rows.append(row)
        return found

    def problem(self, found: Receipt) -> str | None:
        if found.rows and not all(row.error for row in found.rows):
            return None
        return next((row.error for row in found.rows), "No row of the receipt was computed.")

    def as_json(self, found: Receipt) -> dict[str, Any]:
        return {"receipt": {**asdict(found), "exact": found.exact, "all": found.all}}

    def tables(self, found: Receipt) -> list[Table]:
        table = Table(
            f"Receipt {found.exact[:SHOWN]} (exact), {found.all[:SHOWN]} (all)",
            ["", "class", "logits and tokens", "saved session"],
            notes=[
                f"A {found.family} model, weights {found.weights}, fingerprint {found.fingerprint}.",
                f"Numerics version {found.numerics}, prompts {found.prompts[:SHOWN]}.",
                *(f"`{row.label}`: {row.error}" for row in found.rows if row.error),
            ],
        )
        for row in found.rows:
            kind = f"{row.exactness}, same bits" if row.promised else row.exactness
            digests = [f"`{digest[:SHOWN]}`" if digest else "-" for digest in (row.logits, row.session)]
            table.rows.append([f"`{row.label}`", kind or "-", *digests])
        return [table]

    def printed(self, found: Receipt) -> str | None:
        return "\n\n".join(table.markdown() for table in self.tables(found)) if self.markdown else None
