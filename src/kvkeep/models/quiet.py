"""Silences transformers' progress bars and warnings while a model loads."""

from __future__ import annotations

import io
import logging as standard
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers within the block."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = standard.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(standard.ERROR + 1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # gguf's bars have no switch
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            logging.enable_progress_bar()
