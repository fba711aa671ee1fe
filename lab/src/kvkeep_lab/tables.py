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
    """A table with headings and rows of equal length, in Markdown."""

    title: str
    headings: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: Sequence[str] = ()
    """Sentences below the table."""
    named: int = 1
    """Number of columns at the left that identify a row."""

    def markdown(self) -> str:
        """Return the table as Markdown, with the title as a heading of the third level and the first column
        left-aligned."""
        notes = ["", " ".join(self.notes)] if self.notes else []
        return "\n".join([f"### {self.title}", "", markdown(self.headings, self.rows), *notes])


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, right: int | None = None) -> str:
    """Return a Markdown table: the first ``left`` columns left-aligned, ``right`` others (None: all) right-aligned."""
    others = len(headings) - left
    numbers = others if right is None else right
    rule = [*["---"] * left, *["---:"] * numbers, *["---"] * (others - numbers)]
    return "\n".join(_row(cells) for cells in (headings, rule, *rows))


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records (at least one) with the same fields as CSV, with a line of headings. None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def refusals(found: Iterable[tuple[str, object, str]], words: str = "at {}") -> list[str]:
    """Return one sentence for each reason of a method, with all refused cases in ``words``. found: method, refused
    case, and its reason or ""."""
    of: dict[tuple[str, str], list[str]] = {}
    for method, case, reason in found:
        if reason:
            of.setdefault((method, reason), []).append(f"{case}")
    return [
        f"`{name}` {words.format(', '.join(dict.fromkeys(cases)))}: {reason}" for (name, reason), cases in of.items()
    ]


def _row(cells: Iterable[str]) -> str:
    # Labels of a report are already escaped, but method names ("a|b") are not.
    plain = (re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells)
    return f"| {' | '.join(plain)} |"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def fixed(value: float | None, digits: int = 2) -> str:
    """Return a number with ``digits`` digits after the point; "-" for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share as text in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def spread(found: Estimate | None, words: Callable[[float], str], unit: str = "") -> str:
    """Return a mean as text, with its interval in brackets if it is of several numbers."""
    if found is None:
        return "-"
    mean, low, high = (words(value) for value in (found.mean, found.low, found.high))
    return f"{mean}{unit}" if found.n == 1 else f"{mean} [{low}, {high}]{unit}"


def times(value: float | None) -> str:
    """Return a ratio as text."""
    return "-" if value is None else f"{value:.2f} ×"


def megabytes(value: float | None) -> str:
    """Return bytes as text in MB."""
    return "-" if value is None else f"{value / 1e6:,.2f} MB"


def milliseconds(value: float | None) -> str:
    """Return seconds as text in ms."""
    return "-" if value is None else f"{number(1e3 * value)} ms"
