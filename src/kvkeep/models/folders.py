"""Where kvkeep keeps files of its own: converted models and checkpoints on disk."""

from __future__ import annotations

import os
from pathlib import Path

from kvkeep.errors import UsageError


def cache_folder() -> Path:
    """Return the user's cache folder for kvkeep: ``$KVKEEP_CACHE``, or ``kvkeep`` in the XDG cache home.
    Raises UsageError where the user has no home."""
    try:
        if own := os.environ.get("KVKEEP_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkeep"
    except RuntimeError as error:
        raise UsageError("There is no home folder to keep files in; set KVKEEP_CACHE to a folder.") from error
