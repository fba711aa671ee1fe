"""Scratch folders for files that are moved into place when complete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.errors import ModelError, reason_of
from kvkeep.files.atomic import abandoned, owner
from kvkeep.files.private import make_folder

_PREFIX = ".scratch-"


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Yield an empty folder within ``parent``, removed afterwards.

    Also removes folders of killed processes. Raises ModelError where ``parent`` cannot be written or is full.
    """
    try:
        make_folder(parent)
        _sweep(parent)
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


def _sweep(parent: Path) -> None:
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            if abandoned(left, left.name.removeprefix(_PREFIX).rpartition("-")[0]):
                shutil.rmtree(left, ignore_errors=True)
