"""Scratch folders: where files are made before they are moved into place whole."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.errors import ModelError

_PREFIX = ".scratch-"
_STALE = 24 * 3600  # seconds after which the owner is taken for dead, wherever it ran


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Yield an empty folder within ``parent``, removed afterwards whatever happens.

    Removes what killed processes left there, too. Raises ModelError where ``parent`` cannot be written or is full.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        prefix = f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-"
        with tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno is None:  # not the disk: transformers raises bare ones of its own
            raise
        raise unwritable(parent, (error.strerror or str(error)).lower()) from error


def unwritable(folder: Path, reason: str) -> ModelError:
    """Return the error for a folder that takes no files."""
    return ModelError(
        f"kvkeep cannot write to its cache folder '{folder}' ({reason}); make room there, or set KVKEEP_CACHE to "
        "another folder."
    )


def write_text(path: Path, text: str) -> None:
    """Write a file whole: another process sees the old text or the new, never a part."""
    with scratch(path.parent) as folder:
        (folder / path.name).write_text(text)
        os.replace(folder / path.name, path)


def _sweep(parent: Path) -> None:
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            host, process, _ = left.name.removeprefix(_PREFIX).rsplit("-", 2)
            dead = host == socket.gethostname() and not _alive(int(process))
            if dead or time.time() - left.stat().st_mtime > _STALE:
                shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    if os.name != "posix":  # elsewhere signal 0 is a real one
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
