"""Atomic writes: another process sees the old file or the whole new one.

While it is written, a file has a temporary name with host and process, so that a later write removes the files of
killed processes.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

STALE_S = 24 * 3600
"""Seconds after which a temporary file is abandoned, whatever its host."""

_SAVING = ".saving-"
_TEMPORARY = re.compile(rf"\..*{re.escape(_SAVING)}[0-9]+-.+-[0-9]+", re.DOTALL)
_MAX_NAME_BYTES = 120  # maximum bytes of the target's name in a temporary name; a name has at most 255


def write_whole(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object], *, private: bool = False) -> None:
    """Write ``path`` atomically by ``write``.

    A link is followed, and its target replaced. A file that is replaced keeps its mode; a new one has the process's
    default. private: only this user can read the file, and a link is an error. Where a file is replaced, temporary
    files of killed processes are removed. Raises OSError and the errors of ``write``; the previous file then remains.
    """
    target = Path(path) if private else Path(os.path.realpath(path))
    mode = _mode(target)
    if mode is not None:  # a folder may have many files, so new ones do not search it
        _sweep(target)
    if private:
        mode = 0o600
    temporary = target.parent / f"{_prefix(target)}{threading.get_ident()}-{owner()}"
    temporary.unlink(missing_ok=True)  # of an earlier process of the same number
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(temporary, flags, 0o600 if private else 0o666), "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if mode is not None:
                os.chmod(file.fileno() if os.chmod in os.supports_fd else file.name, mode)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_temporary(name: str) -> bool:
    """Return whether a file's name is that of a temporary file."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of dead processes in a folder and its subfolders."""
    for path in folder.rglob(f".*{_SAVING}*"):
        with suppress(OSError, ValueError):
            mark = path.name.rpartition(_SAVING)[2].partition("-")[2]
            if is_temporary(path.name) and stat.S_ISREG(path.lstat().st_mode) and abandoned(path, mark):
                path.unlink()


def lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until its last descriptor is closed; return False if another one holds the lock. On a file
    system without locks every lock is granted."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def sync_name(path: Path) -> None:
    """Flush a file's name to the disk, if the system can flush folders."""
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def owner() -> str:
    """Return host and process, for the name of a temporary file."""
    return f"{socket.gethostname()}-{os.getpid()}"


def abandoned(path: Path, mark: str) -> bool:
    """Return whether the process in ``mark``, from :func:`owner`, is dead, or ``path`` is stale and no other process of
    this host has that number. Raises OSError or ValueError for a file or mark that cannot be read."""
    if dead(mark):
        return True
    host, process = mark.rsplit("-", 1)
    if host == socket.gethostname() and int(process) != os.getpid():
        return False  # whatever the clock says
    return time.time() - path.stat().st_mtime > STALE_S


def dead(mark: str) -> bool:
    """Return whether the process in ``mark``, from :func:`owner`, was of this host, and has ended. Raises ValueError
    for a mark that cannot be read."""
    host, process = mark.rsplit("-", 1)
    return host == socket.gethostname() and not _alive(int(process))


def _mode(target: Path) -> int | None:
    """Return the permissions of the file to be replaced, None where there is none."""
    try:
        found = target.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):  # a device or a pipe would be replaced by a file
        raise OSError(errno.EINVAL, "Not a regular file", str(target))
    return stat.S_IMODE(found)


def _prefix(target: Path) -> str:
    return f".{os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])}{_SAVING}"


def _sweep(target: Path) -> None:
    prefix = _prefix(target)
    with suppress(OSError):
        for name in os.listdir(target.parent):
            if name.startswith(prefix):
                left = target.parent / name
                with suppress(OSError, ValueError):
                    if abandoned(left, name.removeprefix(prefix).partition("-")[2]):
                        left.unlink()


def _alive(process: int) -> bool:
    if os.name != "posix":  # elsewhere signal 0 has an effect
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
