"""Tables on a terminal."""

from __future__ import annotations

import re
import textwrap

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Drawing
from rich.text import Text

from kvkeep.cli.output import out
from kvkeep_lab.tables import Table

_BOLD = re.compile(r"\*\*(.+?)\*\*")
_LEAST = 10  # characters of a heading's line


def show(table: Table) -> None:
    """Print a table. Without a terminal, the table has the width of its contents. A table wider than the terminal is
    printed in parts, each with the columns that identify a row."""
    console = out if out.is_terminal else Console(width=1000, highlight=False)
    out.print(Text(table.title, style="bold"), soft_wrap=True)
    for place, columns in enumerate(_parts(table, console.width)):
        if place:
            out.print()
        console.print(_drawing(table, columns), crop=False, no_wrap=True)
    for sentence in table.notes:
        out.print(_text(sentence), style="dim", soft_wrap=True)
    out.print()


def _parts(table: Table, width: int) -> list[list[int]]:
    """Return the columns of each part."""
    named, others = list(range(table.named)), list(range(table.named, len(table.headings)))
    found: list[list[int]] = [[]]
    for column in others:
        wider = [*found[-1], column]
        drawn = _drawing(table, [*named, *wider])
        if found[-1] and Measurement.get(out, out.options.update(width=1000), drawn).maximum > width:
            found.append([column])
        else:
            found[-1] = wider
    return [[*named, *part] for part in found]


def _drawing(table: Table, columns: list[int]) -> Drawing:
    drawing = Drawing(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        cells = [_text(row[column]) for row in table.rows]
        longest = max((len(cell) for cell in cells), default=0)
        heading = "\n".join(textwrap.wrap(table.headings[column], max(longest, _LEAST), break_long_words=False))
        drawing.add_column(heading, justify="left" if column < table.named else "right", no_wrap=True)
    for row in table.rows:
        drawing.add_row(*(_text(row[column]) for column in columns))
    return drawing


def _text(markdown: str) -> Text:
    """Return a cell as text without code marks, bold where marked."""
    text = Text()
    for place, part in enumerate(_BOLD.split(markdown.replace("`", ""))):
        text.append(part, style="bold" if place % 2 else "")
    return text
