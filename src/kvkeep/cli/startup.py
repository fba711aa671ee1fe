"""What a command that runs a model does after its options were looked at: import, and load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def startup() -> Iterator[None]:
    """Import transformers as far as it is used; the block imports the rest and loads.

    Until its end nothing is collected: what is imported stays, and going through a million objects again and again
    takes a tenth of a start. Afterwards what is there is left out of collections for good.
    """
    from kvkeep.models.imports import import_transformers
    from kvkeep.native.library import trim_memory

    collects = gc.isenabled()
    gc.disable()
    try:
        import_transformers()
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()
        trim_memory()
