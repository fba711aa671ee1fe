"""Silences transformers' progress bars and warnings while a model loads, and while a user reads the output."""

from __future__ import annotations

import logging as standard
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence transformers' warnings within the block."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def silenced() -> Iterator[None]:
    """Silence transformers and its hub within the block; kvkeep's warnings are still shown."""
    bars, hub = logging.is_progress_bar_enabled(), standard.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(standard.ERROR + 1)
    logging.disable_progress_bar()
    try:
        with without_warnings():
            yield
    finally:
        hub.setLevel(level)
        if bars:
            logging.enable_progress_bar()
