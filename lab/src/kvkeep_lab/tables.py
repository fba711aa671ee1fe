"""Tables of text, and the format of their numbers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvkeep_lab.statistics import Estimate


@dataclass
class Table:
    """A table: headings, and rows as long, in Markdown. notes: what is to be said below it, a sentence each. named:
    columns at the left that say what a row is of."""

    title: str
    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: Sequence[str] = ()
    named: int = 1

    def markdown(self) -> str:
        """Return it as Markdown: the title as a heading of the third level, the first column to the left."""
        notes = ["", " ".join(self.notes)] if self.notes else []
        return "\n".join([f"### {self.title}", "", markdown(self.headings, self.rows), *notes])


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, right: int | None = None) -> str:
    """Return a Markdown table: the first ``left`` columns to the left, ``right`` others (None: all) to the right."""
    others = len(headings) - left
    numbers = others if right is None else right
    rule = [*["---"] * left, *["---:"] * numbers, *["---"] * (others - numbers)]
    return "\n".join(_row(cells) for cells in (headings, rule, *rows))


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records (one at least) with the same fields as CSV, with a line of headings; None is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def refusals(found: Iterable[tuple[str, object, str]], words: str = "at {}") -> list[str]:
    """Return a sentence for each reason of a method, once, with all that it refused in ``words``. found: method, what
    it was asked for, and its reason or ""."""
    of: dict[tuple[str, str], list[str]] = {}
    for method, case, reason in found:
        if reason:
            of.setdefault((method, reason), []).append(f"{case}")
    return [
        f"`{name}` {words.format(', '.join(dict.fromkeys(cases)))}: {reason}" for (name, reason), cases in of.items()
    ]


def _row(cells: Iterable[str]) -> str:
    # Labels of a report are escaped already, method names ("a|b") are not.
    plain = (re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells)
    return f"| {' | '.join(plain)} |"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many digits that count; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def fixed(value: float | None, digits: int = 2) -> str:
    """Return a number with so many digits after the point; "-" where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def spread(found: Estimate | None, words: Callable[[float], str], unit: str = "") -> str:
    """Return a mean in words, with its interval in brackets where it is of several numbers."""
    if found is None:
        return "-"
    mean, low, high = (words(value) for value in (found.mean, found.low, found.high))
    return f"{mean}{unit}" if found.n == 1 else f"{mean} [{low}, {high}]{unit}"


def times(value: float | None) -> str:
    """Return a ratio."""
    return "-" if value is None else f"{value:.2f} ×"


def megabytes(value: float | None) -> str:
    """Return bytes in MB."""
    return "-" if value is None else f"{value / 1e6:,.2f} MB"


def milliseconds(value: float | None) -> str:
    """Return seconds in ms."""
    return "-" if value is None else f"{number(1e3 * value)} ms"
