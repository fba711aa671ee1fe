"""Where kvkeep keeps files of its own: converted models and checkpoints on disk."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the user's cache folder for kvkeep: ``$KVKEEP_CACHE``, or ``kvkeep`` in the XDG cache home."""
    if own := os.environ.get("KVKEEP_CACHE"):
        return Path(own).expanduser()  # whoever sets it without a shell writes ~ all the same
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvkeep"
