"""The folders of kvkeep's files, and scratch folders for files that are moved into place when complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.errors import ModelError, UsageError, reason_of
from kvkeep.files import abandoned, make_folder, owner

_PREFIX = ".scratch-"


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


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Yield an empty folder within ``parent``, removed afterwards.

    Also removes folders of killed processes. Raises ModelError where ``parent`` cannot be written or is full.
    """
    try:
        make_folder(parent)
        for left in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError, ValueError):
                if abandoned(left, left.name.removeprefix(_PREFIX).rpartition("-")[0]):
                    shutil.rmtree(left, ignore_errors=True)
        prefix = f"{_PREFIX}{owner()}-"
        with tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno is None:  # transformers raises OSError without errno
            raise
        raise unwritable(parent, reason_of(error)) from error


def unwritable(folder: Path, reason: str) -> ModelError:
    """Return the error for a folder that cannot be written."""
    return ModelError(
        f"kvkeep cannot write to its cache folder '{folder}' ({reason}); free space there, or set KVKEEP_CACHE to "
        "another folder."
    )
