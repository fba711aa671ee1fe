"""The folders of kvkeep's files: converted models, checkpoints on disk, and sessions."""

from __future__ import annotations

import os
from pathlib import Path

from kvkeep.errors import UsageError


def cache_folder() -> Path:
    """Return the user's cache folder for kvkeep: ``$KVKEEP_CACHE``, or ``kvkeep`` in the XDG cache home. Raises
    UsageError if the user has no home."""
    return _folder("KVKEEP_CACHE", "XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """Return the user's folder for permanent data: ``$KVKEEP_DATA``, or ``kvkeep`` in the XDG data home. Raises
    UsageError if the user has no home."""
    return _folder("KVKEEP_DATA", "XDG_DATA_HOME", ".local/share")


def _folder(variable: str, home: str, within: str) -> Path:
    try:
        if chosen := os.environ.get(variable):
            return Path(chosen).expanduser()
        return Path(os.environ.get(home) or Path.home() / within) / "kvkeep"
    except RuntimeError as error:
        raise UsageError(f"This user has no home folder; set {variable} to a folder for kvkeep's files.") from error
