"""Output of the commands: text and tables or one JSON object, and progress on standard error."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

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
    """Print a table; as wide as it needs to be, unless on a terminal or where ``$COLUMNS`` says how wide."""
    needed = Measurement.get(out, out.options.update(width=1000), table).maximum
    fixed = out.is_terminal or os.environ.get("COLUMNS")
    (out if fixed else Console(width=max(needed, out.width), highlight=False)).print(table)


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


@contextmanager
def reading(total: int, label: str = "reading") -> Iterator[Callable[[int], None]]:
    """Show a progress bar of prompt tokens, removed when all are read."""
    columns = (SpinnerColumn(), TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(done: int) -> None:
            progress.update(task, completed=min(done, total))
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
