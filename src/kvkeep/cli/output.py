"""Output of the commands: text and tables, or one JSON object. Progress and messages are written to standard error."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
SILENCE_S = 1.0
"""Seconds of work after which a line reports progress, if there is no terminal for a bar."""

_CONTROLS = {
    code: None
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Return ``text`` without terminal escapes and bidi controls, which a model or a document may contain."""
    return text.translate(_CONTROLS)


def print_json(value: Any) -> None:
    """Print a JSON object on standard output. It is ASCII unless the stream's encoding is Unicode."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(json.dumps(value, ensure_ascii=not unicode) + "\n")


def write(text: str) -> None:
    """Print a piece of streamed text unchanged."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_answer(text: str) -> None:
    """Print a piece of a model's answer. A terminal gets it without escapes."""
    write(printable(text) if out.is_terminal else text)


def note(text: str) -> None:
    """Print a message on standard error. It is wrapped only on a terminal, so that URLs and paths stay in one piece."""
    err.print(printable(text), style="dim", markup=False, soft_wrap=not err.is_terminal)


def show(table: Table) -> None:
    """Print a table. Its width is that of the terminal or ``$COLUMNS``, else that of its contents. Headings and
    sentences wrap between words. Numbers and names never wrap; they may make the table wider."""
    narrow = out.is_terminal or os.environ.get("COLUMNS")
    for column in table.columns if narrow else ():
        cells, heading = [str(cell) for cell in column.cells], str(column.header).split()
        numbers = column.justify == "right"
        column.min_width = max(map(cell_len, [*heading, *(cells if numbers else " ".join(cells).split())]), default=0)
        column.width, column.no_wrap = column.min_width if numbers else None, False
        table.pad_edge, table.collapse_padding = False, True
    needed = Measurement.get(out, out.options.update(width=1000), table)
    width = needed.minimum if narrow else needed.maximum
    (out if width <= out.width else Console(width=width, highlight=False)).print(table)


class RemainingTime(ProgressColumn):
    """A column with the estimated remaining time, or with the elapsed time while there is no estimate."""

    def render(self, task: Task) -> Text:
        """Return minutes and seconds."""
        left = task.time_remaining
        seconds = int(task.elapsed or 0) if left is None else int(left)
        return Text(f"{seconds // 60}:{seconds % 60:02}{'' if left is None else ' left'}")


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Show on a terminal that a model is being loaded, and the elapsed time, within the block."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), RemainingTime())
    err.file = sys.stderr  # which loading redirects, to silence libraries
    try:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
            progress.add_task(printable(f"Loading {name} ..."), total=None)
            yield
    finally:
        err.file = None  # type: ignore[assignment] # whatever sys.stderr is


@contextmanager
def reading(
    total: int, label: str = "Reading", *, known: int = 0, silent: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of prompt tokens, with their number, rate and remaining time, on a terminal, and remove it
    after the last token. Without a terminal, print a line after :data:`SILENCE_S` seconds, unless ``silent``. known:
    the number of tokens that need not be read."""
    line = f"{label} {total:,} token{'' if total == 1 else 's'}"
    if not err.is_terminal:
        timer = Timer(SILENCE_S, note, [f"{line} ..."])
        timer.daemon = True
        if not silent:
            timer.start()
        try:
            yield lambda done: timer.cancel() if done >= total else None
        finally:
            timer.cancel()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), RemainingTime())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(line, total=None, completed=known)

        def advance(done: int) -> None:
            speed = progress.tasks[0].speed
            done_at = f"{line}, {done:,} done" + (f" at {speed:.0f}/s" if speed else "")
            progress.update(task, completed=min(done, total), total=total, description=done_at)
            if done >= total:
                progress.stop()

        yield advance


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C within the block: the first sets a flag, which the yielded function returns; the second raises
    KeyboardInterrupt."""
    raised = False

    def raise_flag(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            raise KeyboardInterrupt
        raised = True

    before = signal.signal(signal.SIGINT, raise_flag)
    try:
        yield lambda: raised
    finally:
        signal.signal(signal.SIGINT, before)
