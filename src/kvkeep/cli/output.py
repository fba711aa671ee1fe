"""Output of the commands: text and tables or one JSON object, and progress on standard error."""

from __future__ import annotations

import json
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
SILENCE_S = 1.0
"""Seconds of work after which a line says what is going on, where there is no terminal for a bar."""

_COMMANDS = {
    code: None
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


def printable(text: str) -> str:
    """Return ``text`` without the characters that command a terminal, or turn the direction of what follows: a model or
    a document may have any."""
    return text.translate(_COMMANDS)


def print_json(value: Any) -> None:
    """Print one JSON object on standard output; in ASCII where its encoding is no Unicode."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(json.dumps(value, ensure_ascii=not unicode) + "\n")


def write(text: str) -> None:
    """Print a piece of streamed text as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_answer(text: str) -> None:
    """Print a piece of what a model writes: as it is, but to a terminal without what would command it."""
    write(printable(text) if out.is_terminal else text)


def note(text: str) -> None:
    """Print a message on standard error; unless on a terminal, in one line: addresses and paths stay whole."""
    err.print(printable(text), style="dim", markup=False, soft_wrap=not err.is_terminal)


def show(table: Table) -> None:
    """Print a table; unless on a terminal, as wide as it needs to be."""
    needed = Measurement.get(out, out.options.update(width=1000), table).maximum
    (out if out.is_terminal else Console(width=max(needed, out.width), highlight=False)).print(table)


def machine(loaded: Any) -> dict[str, Any]:
    """Return the conditions of a measurement: model, weights, threads, versions, device, processor, and the path that
    the native library takes on it."""
    import torch
    import transformers

    from kvkeep.models.loading import weights_of
    from kvkeep.native.library import path
    from kvkeep.plan.estimate import processor_name

    return {
        "model": loaded.name,
        "weights": weights_of(loaded),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(loaded.model.device),
        "path": path(),
        "processor": processor_name("cpu"),
    }


class _Time(ProgressColumn):
    """The time that is left, once there is an estimate; until then the time that has passed."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        seconds = int(task.elapsed or 0) if left is None else int(left)
        return Text(f"{seconds // 60}:{seconds % 60:02}{'' if left is None else ' left'}")


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Within the block, show on a terminal that a model is being loaded, and for how long."""
    columns = (SpinnerColumn(), TextColumn(f"Loading {name} ..."), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        progress.add_task("")
        yield


@contextmanager
def reading(total: int, label: str = "Reading", *, silent: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of prompt tokens, removed when all are read; unless on a terminal, a line if it takes longer
    than :data:`SILENCE_S`. silent: on a terminal only."""
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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Time())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(line, total=None)

        def advance(done: int) -> None:
            progress.update(task, completed=min(done, total), total=total, description=f"{line}, {done:,} done")
            if done >= total:
                progress.stop()

        yield advance


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within the block the first Ctrl-C sets a flag, which the yielded function returns; the second interrupts."""
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
