"""Imports and loading, after the options of a command are checked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from kvkeep.cli.fetching import fetch_model
from kvkeep.cli.output import loading


@contextmanager
def startup(model: str | None = None) -> Iterator[None]:
    """Fetch ``model`` if it is an embedded one, import the used part of transformers, then run the block, which imports
    the rest and loads the model. A terminal shows the download, and that the model is being loaded.

    Garbage collection is off during the block and ignores the objects made in it afterwards. Imported modules stay in
    memory, and repeated scans of a million objects take a tenth of the start.
    """
    if model is not None:
        fetch_model(model)
    with nullcontext() if model is None else loading(model):
        # Imported here, so that the terminal shows the message before the slow import.
        from kvkeep.models.imports import import_transformers
        from kvkeep.native.library import trim_memory

        enabled = gc.isenabled()
        gc.disable()
        try:
            import_transformers()
            yield
        finally:
            if enabled:
                gc.freeze()
                gc.enable()
            trim_memory()
