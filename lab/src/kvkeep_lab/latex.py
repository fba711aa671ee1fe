"""Tables as LaTeX for papers, with the rules of the package booktabs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvkeep_lab.tables import Table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "×": r"$\times$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def escaped(text: str) -> str:
    """Return plain text as LaTeX that prints it."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def booktabs(table: Table, caption: str, label: str, grouped: Sequence[str] = ()) -> str:
    """Return a floating LaTeX table, which needs ``\\usepackage{booktabs}``. The caption is above the table. Columns
    that identify a row are left-aligned, the others right-aligned. caption: plain text. grouped: a word for each row;
    rows with different words are separated by space. Cells are Markdown with ``code`` and **bold**."""
    numbers = len(table.headings) - table.named
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        "  \\footnotesize",
        "  \\setlength{\\tabcolsep}{4pt}",
        f"  \\caption{{{escaped(caption)}}}",
        f"  \\label{{{label}}}",
        f"  \\begin{{tabular}}{{{'l' * table.named}{'r' * numbers}}}",
        "    \\toprule",
        f"    {_row(table.headings)}",
        "    \\midrule",
    ]
    for place, row in enumerate(table.rows):
        if grouped and place and grouped[place] != grouped[place - 1]:
            lines.append("    \\addlinespace")
        lines.append(f"    {_row(row)}")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


def _row(cells: Sequence[str]) -> str:
    return " & ".join(map(_cell, cells)) + r" \\"


def _cell(markdown: str) -> str:
    """Return a cell. An interval, in brackets after a number, has a smaller font."""
    if bold := re.fullmatch(r"\*\*(.+)\*\*", markdown):
        return f"\\textbf{{{_cell(bold[1])}}}"
    if interval := re.fullmatch(r"(\S+) (\[[^\]]+\])(.*)", markdown):
        number, brackets, unit = map(_number, interval.groups())
        return f"{number} {{\\scriptsize {brackets}}}{unit}"
    parts = markdown.split("`")
    return "".join(f"\\texttt{{{escaped(part)}}}" if place % 2 else _number(part) for place, part in enumerate(parts))


def _number(text: str) -> str:
    """Return plain text as LaTeX, with exponents of numbers as powers of ten."""
    return re.sub(r"(\d)e([+-]?)0*(\d+)", r"\1$\\cdot10^{\2\3}$", escaped(text)).replace("^{+", "^{")
