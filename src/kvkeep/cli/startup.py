"""Downloads, imports and loading, after the options of a command are checked."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn

from kvkeep.budget import size
from kvkeep.cli.output import RemainingTime, err, loading, note
from kvkeep.errors import OutOfMemory
from kvkeep.models.embedded import EMBEDDED
from kvkeep.native.room import address_space_left

OTHER_LIBRARIES_BYTES = 330_000_000
"""The address space of what is imported beside torch's own libraries (numpy, transformers, tokenizers; measured: 250
MB), and of the stack and the heap of a thread."""

SPINS = "20000"
"""How often a thread of OpenMP that waits asks for work before it sleeps. libgomp's own number is 300,000: then threads
take much of a machine on which other programs run."""


@contextmanager
def startup(model: str | None = None) -> Iterator[None]:
    """Fetch ``model`` if it is an embedded one, import the used part of transformers, then run the block, which imports
    the rest and loads the model. A terminal shows the download, and that the model is being loaded.

    Garbage collection is off during the block and ignores the objects made in it afterwards. Imported modules stay in
    memory, and repeated scans of a million objects take a tenth of the start.
    """
    _check_address_space()
    if "OMP_WAIT_POLICY" not in os.environ:  # libgomp reads both when torch is imported
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if model is not None:
        fetch_model(model)
    with nullcontext() if model is None else loading(model):
        # Imported here, so that the terminal shows the message before the slow import.
        from kvkeep.cli.imports import import_transformers
        from kvkeep.native.library import trim_memory
        from kvkeep.native.threads import limit_threads

        enabled = gc.isenabled()
        gc.disable()
        try:
            import_transformers()
            limit_threads()  # before torch starts any
            yield
        finally:
            if enabled:
                gc.freeze()
                gc.enable()
            trim_memory()


def _check_address_space() -> None:
    """Raise OutOfMemory if the process may not map what it is about to import: some of these libraries end the process
    where they find no memory."""
    left, torch = address_space_left(), find_spec("torch")
    if left is None or "torch" in sys.modules or torch is None or torch.origin is None:
        return
    files = Path(torch.origin).with_name("lib").glob("*.so*")
    needed = OTHER_LIBRARIES_BYTES + sum(file.stat().st_size for file in files)
    if left < needed:
        raise OutOfMemory(
            f"There is not enough memory: kvkeep needs {size(needed)} of address space for its libraries alone, and "
            f"{size(left)} are left to this process; raise its limit (ulimit -v)."
        )


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
        note("Interrupted. The part that has arrived is kept; the same command fetches the rest.")
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
