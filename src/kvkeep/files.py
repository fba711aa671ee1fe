"""Atomic writes: another process sees the old file or the whole new one, and killed processes leave no files behind.

On Linux the data goes into an unnamed file, which the system frees when its process ends and which is linked when it is
complete. Elsewhere, and while it replaces another file, it has a temporary name with host and process, so that a later
write removes the files of dead processes.
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
_NAMELESS_REFUSED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EPERM)


def write_whole(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object], *, private: bool = False) -> None:
    """Write ``path`` atomically by ``write``, which may be called twice.

    A link is followed, and its target replaced. A file that is replaced keeps its mode; a new one has the process's
    default. private: only this user can read the file, and a link is an error. Temporary files of killed processes are
    removed. Raises OSError and the errors of ``write``; the previous file then remains.
    """
    target = Path(path) if private else Path(os.path.realpath(path))
    mode, temporary = _mode(target), _temporary(target)
    if private:
        mode = 0o600
    try:
        if not _write_nameless(target, temporary, mode, write):
            _sweep(target)
            with create_new(temporary, 0o600 if private else 0o666) as file:
                _fill(file, mode, write)
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_name(target: Path) -> Path:
    """Return a name beside ``target`` for a file that is to become it; such files of dead processes are removed."""
    _sweep(target)
    return _temporary(target)


def create_new(path: Path, mode: int = 0o600) -> IO[bytes]:
    """Create a temporary file and open it. What an earlier process of the same number left there is removed. mode:
    before the process's umask. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, mode), "w+b")


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


def _temporary(target: Path) -> Path:
    return target.parent / f"{_prefix(target)}{threading.get_ident()}-{owner()}"


def _sweep(target: Path) -> None:
    prefix = _prefix(target)
    with suppress(OSError):
        for name in os.listdir(target.parent):
            if name.startswith(prefix):
                left = target.parent / name
                with suppress(OSError, ValueError):
                    if abandoned(left, name.removeprefix(prefix).partition("-")[2]):
                        left.unlink()


def _fill(file: IO[bytes], mode: int | None, write: Callable[[IO[bytes]], object]) -> None:
    write(file)
    file.flush()
    os.fsync(file.fileno())
    if mode is not None:
        os.chmod(file.fileno() if os.chmod in os.supports_fd else file.name, mode)


def _write_nameless(target: Path, temporary: Path, mode: int | None, write: Callable[[IO[bytes]], object]) -> bool:
    """Write a file without a name and give it one; return False if system or file system cannot."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return False
    try:
        handle = os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
    except OSError as error:
        if error.errno in _NAMELESS_REFUSED:
            return False
        raise
    with os.fdopen(handle, "w+b") as file:
        fresh = not os.path.lexists(target)
        _fill(file, mode, write)
        try:
            if fresh:
                with suppress(FileExistsError):  # another process was faster; its file is replaced
                    _link(file, target)
                    return True
            _sweep(target)  # only here, because a folder may have many files
            _link(file, temporary)
        except OSError:  # some file systems cannot link unnamed files
            return False
    os.replace(temporary, target)
    return True


def _link(file: IO[bytes], path: Path) -> None:
    """Give an open file a name."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With a folder, Python calls linkat(2), which follows the link. link(2) does not.
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


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
