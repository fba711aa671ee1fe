"""Files and folders of one user, in places where something else may lie.

Modes are 0600 and 0700 whatever the umask. A link, a pipe, a device or a folder in the place of a file is an OSError
that names its kind: it is neither followed nor opened nor waited for. So is a link in the place of a folder.
"""

from __future__ import annotations

import errno
import io
import math
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from kvkeep.files.atomic import lock

FILE_MODE, FOLDER_MODE = 0o600, 0o700
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_ATTEMPTS = 100
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of a path at which there is nothing; the last one is that of a folder of another machine."""


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Return what lies at a path ("a file", "a folder", "a link", …); None if there is nothing. Raises OSError."""
    try:
        return _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "something else")
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file lies at a path, and no link to one."""
    with suppress(OSError, ValueError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder lies at a path, and no link to one."""
    with suppress(OSError, ValueError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def check_kind(path: str | os.PathLike[str], wanted: str = "a file") -> None:
    """Raise OSError if something else than ``wanted`` lies at a path."""
    if (kind := kind_of(path)) not in (None, wanted):
        code = errno.ELOOP if kind == "a link" else errno.EINVAL
        raise OSError(code, f"'{os.path.basename(path)}' there is {kind} and not {wanted} of kvkeep", os.fspath(path))


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
        if flags & os.O_CREAT and facts.st_nlink == 1 and stat.S_IMODE(facts.st_mode) != FILE_MODE:
            with suppress(OSError):  # some file systems have no permissions
                os.chmod(handle if os.chmod in os.supports_fd else path, FILE_MODE)
    except BaseException:
        os.close(handle)
        raise
    return handle


def as_file(handle: int, mode: str) -> IO[bytes]:
    """Return the unbuffered file of a descriptor, which is closed with it, also where this raises OSError."""
    try:
        return io.FileIO(handle, mode)
    except BaseException:
        os.close(handle)
        raise


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of a file. Raises OSError, also for one of more than ``limit`` bytes, which is not read."""
    with as_file(open_file(path), "r") as file:
        content = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    if content is None or len(content) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return content


def holds(handle: int, path: Path) -> bool:
    """Return whether ``path`` is the name of the open file ``handle``: a lock on a file that was removed or replaced
    excludes no other program. Raises OSError."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError as error:
        if error.errno in GONE:
            return False
        raise


def keep_lock(handle: int, path: Path) -> bool:
    """Return whether the locked file ``handle`` can be kept: it has the name ``path``, and no other one. Otherwise the
    caller opens the file again. A name that another file shares is removed: copies of folders by hard links have such
    names, and would change."""
    if not holds(handle, path):
        return False
    if os.fstat(handle).st_nlink > 1:
        os.unlink(path)
        return False
    return True


def wait_for_lock(path: Path, patience_s: float = math.inf) -> int:
    """Open and lock a file, waiting for others at most ``patience_s`` seconds; return its descriptor. On a file system
    without locks every program gets it. Raises BlockingIOError if another program holds the lock, and OSError."""
    until = time.monotonic() + patience_s
    for _ in range(_ATTEMPTS):
        handle = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            while not lock(handle, wait=patience_s == math.inf):
                if time.monotonic() > until:
                    raise BlockingIOError(errno.EAGAIN, "it is locked", os.fspath(path))
                time.sleep(0.02)
            if keep_lock(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise OSError(errno.EAGAIN, "it changes all the time", os.fspath(path))
