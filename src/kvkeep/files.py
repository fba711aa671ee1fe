"""Files and folders of one user, on a disk that others use, too.

A file is written as a whole: another process sees the old file or the new one. While it is written, it has a temporary
name with host and process, so that the files of killed processes are found and removed.

A private file has mode 0600, and a folder 0700, whatever the umask. A link, a pipe, a device or a folder in the place
of a private file is an OSError that names its kind: it is neither followed nor opened nor waited for. So is a link in
the place of a folder.
"""

from __future__ import annotations

import errno
import math
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

FILE_MODE, FOLDER_MODE = 0o600, 0o700
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of a path at which there is nothing; the last one is that of a folder of another machine."""
STALE_S = 24 * 3600
"""Seconds after which a temporary file is abandoned, whatever its host."""
_SAVING = ".saving-"
_TEMPORARY = re.compile(rf"\..*{re.escape(_SAVING)}[0-9]+-.+-[0-9]+", re.DOTALL)
_MAX_NAME_BYTES = 120  # maximum bytes of the target's name in a temporary name; a name has at most 255
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


# -- what lies at a path ----------------------------------------------------------------------------------


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Return what lies at a path ("a file", "a folder", "a link", …); None if there is nothing. Raises OSError."""
    try:
        return _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "something else")
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file lies at a path, and no link to one."""
    with suppress(OSError, ValueError):
        return kind_of(path) == "a file"
    return False


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder lies at a path, and no link to one."""
    with suppress(OSError, ValueError):
        return kind_of(path) == "a folder"
    return False


def check_kind(path: str | os.PathLike[str], wanted: str = "a file") -> None:
    """Raise OSError if something else than ``wanted`` lies at a path."""
    if (kind := kind_of(path)) not in (None, wanted):
        code = errno.ELOOP if kind == "a link" else errno.EINVAL
        raise OSError(code, f"'{os.path.basename(path)}' there is {kind} and not {wanted} of kvkeep", os.fspath(path))


# -- writing ----------------------------------------------------------------------------------------------


def write_whole(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Write ``path`` atomically by ``write``, as a private file.

    Where a file is replaced, temporary files of killed processes are removed. Raises OSError and the errors of
    ``write``; the previous file then remains.
    """
    target = Path(path)
    prefix = f".{os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])}{_SAVING}"
    if (kind := kind_of(target)) is not None:  # a folder may have many files, so new ones do not search it
        if kind != "a file":  # a device or a pipe would be replaced by a file
            raise OSError(errno.EINVAL, "Not a regular file", str(target))
        _remove_temporary([path for path in target.parent.iterdir() if path.name.startswith(prefix)])
    temporary = target.parent / f"{prefix}{threading.get_ident()}-{owner()}"
    temporary.unlink(missing_ok=True)  # of an earlier process of the same number
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(temporary, flags, FILE_MODE), "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.fileno() if os.chmod in os.supports_fd else file.name, FILE_MODE)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_name(path: Path) -> None:
    """Flush a file's name to the disk, if the system can flush folders."""
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# -- what killed processes left behind --------------------------------------------------------------------


def is_temporary(name: str) -> bool:
    """Return whether a file's name is that of a temporary file."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of dead processes in a folder and its subfolders."""
    _remove_temporary([*folder.rglob(f".*{_SAVING}*")])


def _remove_temporary(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError, ValueError):
            mark = path.name.rpartition(_SAVING)[2].partition("-")[2]
            if is_temporary(path.name) and is_file(path) and abandoned(path, mark):
                path.unlink()


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
    if host != socket.gethostname() or os.name != "posix":  # elsewhere signal 0 has an effect
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


# -- private files and folders ----------------------------------------------------------------------------


def make_folder(folder: Path, within: Path | None = None) -> None:
    """Create a folder, and those above it that are missing. within: a folder above it, or itself; no folder below that
    may be a link. Raises OSError."""
    if within is not None and folder != within and folder.is_relative_to(within):
        make_folder(folder.parent, within)
        check_kind(folder, "a folder")
    try:
        os.mkdir(folder, FOLDER_MODE)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        make_folder(folder)
    except OSError:  # on a read-only disk of any kind
        if not folder.is_dir():
            raise
    else:
        if stat.S_IMODE(os.stat(folder).st_mode) & FOLDER_MODE != FOLDER_MODE:  # the umask takes from the user, too
            os.chmod(folder, FOLDER_MODE)


def close_to_others(folder: Path) -> str | None:
    """Take from other users what they may do with a folder of this user; return a part of a sentence about it, or None
    if they could do nothing."""
    with suppress(OSError):
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if os.name != "posix" or not mode & 0o077:
            return None
        try:
            os.chmod(folder, mode & ~0o077)
        except OSError:
            return f"is open to other users (mode {mode:04o}) and belongs to one of them"
        return f"was open to other users (mode {mode:04o}), and is closed to them"
    return None


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file and return its descriptor; with O_CREAT, a missing one is created. Raises OSError."""
    check_kind(path)
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    handle = os.open(path, flags | safe, FILE_MODE)
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a file", os.fspath(path))
        if flags & os.O_CREAT and stat.S_IMODE(facts.st_mode) != FILE_MODE:
            with suppress(OSError):  # some file systems have no permissions
                os.chmod(handle if os.chmod in os.supports_fd else path, FILE_MODE)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a file. Raises OSError, also for one of more than ``limit`` bytes, which is not read."""
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        content = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    if content is None or len(content) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return content


# -- locks ------------------------------------------------------------------------------------------------


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


def holds(handle: int, path: Path) -> bool:
    """Return whether ``path`` is the name of the open file ``handle``: a lock on a file that was removed or replaced
    excludes no other program. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError as error:
        if error.errno in GONE:
            return False
        raise


def wait_for_lock(path: Path, patience_s: float = math.inf) -> int:
    """Open and lock a file, waiting for others at most ``patience_s`` seconds; return its descriptor. On a file system
    without locks every program gets it. Raises BlockingIOError if another program holds the lock, and OSError."""
    until = time.monotonic() + patience_s
    for _ in range(100):
        handle = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            while not lock(handle, wait=patience_s == math.inf):
                if time.monotonic() > until:
                    raise BlockingIOError(errno.EAGAIN, "it is locked", os.fspath(path))
                time.sleep(0.02)
            if holds(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise OSError(errno.EAGAIN, "it keeps changing", os.fspath(path))
