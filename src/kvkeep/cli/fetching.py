"""Fetching an embedded model before a command loads it, with a progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn

from kvkeep.cli.output import RemainingTime, err, note
from kvkeep.models.embedded import EMBEDDED


def fetch_model(name: str) -> None:
    """Fetch the embedded model ``name`` if it is not on this machine. Other names are left to loading. Raises
    ModelError as :func:`kvkeep.models.fetching.fetch` does."""
    if name not in EMBEDDED:
        return
    from kvkeep.models.fetching import fetch

    model = EMBEDDED[name]
    try:
        with _bar(model.size) as advance:
            fetch(model, note, advance)
    except KeyboardInterrupt:
        note("Interrupted. What has arrived is kept; the same command fetches the rest.")
        raise


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many of ``total`` bytes have arrived, in a bar that its first call starts."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), RemainingTime())
    progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    tasks: list[TaskID] = []

    def advance(done: int) -> None:
        if tasks:
            progress.update(tasks[0], completed=done)
        else:  # the bytes of an earlier call do not count for the speed
            tasks.append(progress.add_task("", total=total, completed=done))
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()
