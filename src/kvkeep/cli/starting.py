"""What a command that runs a model does after its options were looked at: import, and load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from kvkeep.cli.output import loading


@contextmanager
def starting(model: str | None = None) -> Iterator[None]:
    """Import transformers as far as it is used; the block imports the rest and loads. A terminal shows that ``model``
    is being loaded.

    Until its end nothing is collected: what is imported stays, and going through a million objects again and again
    takes a tenth of a start. Afterwards what is there is left out of collections for good.
    """
    with nullcontext() if model is None else loading(model):
        # Imported here, so that the terminal shows something before it takes time.
        from kvkeep.models.freed import give_back
        from kvkeep.models.imports import import_transformers

        collects = gc.isenabled()
        gc.disable()
        try:
            import_transformers()
            yield
        finally:
            if collects:
                gc.freeze()
                gc.enable()
            give_back()
