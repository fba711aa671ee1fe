"""References: small files that name a session's blocks.

A session is a folder of numbered files, its generations; the highest number counts. A file is JSON with a checksum, and
is never changed. A writer creates the next number, and fails if that number exists: then another program has continued
the session, and its turn counts. This needs no locks, so it also holds between machines that share a folder. On one
machine a lock tells a second program earlier that the session is in use.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from kvkeep.errors import SessionBusy, SessionDamaged, SessionError, SessionUnwritable
from kvkeep.files import lock, sync_name, temporary_name

LOCK = "lock"
_GENERATION = ".json"
_SHARED = ".shared"
_FOLDER = "folder"
_CHECK_BYTES = 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LINKS_REFUSED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Reference:
    """The reference of one session in ``folder``.

    writing: open for writing, which creates a missing session; shared: other machines use the folder, so that no lock
    is held. Raises SessionError if there is no such session, SessionDamaged if its bytes differ from those written,
    SessionBusy if another program writes, and SessionUnwritable.
    """

    def __init__(self, folder: Path, *, writing: bool = False, shared: bool = False) -> None:
        self.folder, self.writing = folder, writing
        self.about: dict[str, Any] | None = None
        """The saved data; None before the first save."""
        self.generation = 0
        """The number of saves."""
        self.mark = ""
        """The unique mark of the last save."""
        self._lock: int | None = None
        self.closed = False
        if writing:
            self._open(shared)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> str:
        """The path of the session's folder."""
        return str(self.folder)

    def close(self) -> None:
        """Release the session. A session without a save is removed."""
        if self.closed:
            return
        self.closed = True
        with suppress(OSError):
            if self.writing and not generations(self.folder):
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)

    def commit(self, about: dict[str, Any]) -> None:
        """Save ``about`` (plain types) as the next generation. Raises SessionBusy if another program has continued the
        session, and SessionUnwritable; the previous generation then counts."""
        data = encode(about | {_FOLDER: self._name})
        target = self._path(self.generation + 1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _create(target, data, locked=self._lock is not None)
        except FileExistsError as error:
            raise self._followed() from error
        except OSError as error:
            raise unwritable(self.folder, error) from error
        if self._overtaken():
            with suppress(OSError):
                target.unlink()
            raise self._followed()
        self.generation, (self.about, self.mark) = self.generation + 1, decode(data)
        self.about.pop(_FOLDER)
        with suppress(OSError):
            for number in generations(self.folder):
                if number < self.generation:
                    self._path(number).unlink()

    def share(self, key: str) -> None:
        """Note that another session is given the block ``key``, the state of a save. Raises SessionUnwritable."""
        try:
            with suppress(FileExistsError):
                _create(self.folder / f"{key}{_SHARED}", b"", locked=False)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def unshare(self, key: str) -> bool:
        """Remove the note of :meth:`share`; return whether there was one, or whether that is unknown."""
        try:
            notes = [path for path in self.folder.iterdir() if path.name == f"{key}{_SHARED}"]
            for path in notes:
                path.unlink(missing_ok=True)
        except OSError:
            return True
        return bool(notes)

    def follows(self, mark: str) -> bool:
        """Return whether the session is as the program saved it that got ``mark``."""
        return self.mark == mark

    def remove(self) -> None:
        """Remove the session, and close it."""
        remove_folder(self.folder)
        self.close()

    def _open(self, shared: bool) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while not shared and self._lock is None:
                self._lock = self._locked()
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _locked(self) -> int | None:
        """Return the open file that is locked; None if another program has removed it meanwhile."""
        path, until = self.folder / LOCK, time.monotonic() + 0.1
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            try:
                while not lock(handle):  # another process may hold it for a moment to see whether the session is in use
                    if time.monotonic() > until:
                        raise SessionBusy(
                            f"The session '{self.folder}' is in use by another program; end that program, or name "
                            "another session."
                        )
                    time.sleep(0.02)
                os.utime(path)
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
        return None

    def _read(self) -> None:
        for _ in range(9):  # a writer may remove the number that was just found
            try:
                number = max(generations(self.folder), default=0)
                if not number:
                    if not self.writing:
                        raise SessionError(f"There is no session at '{self.folder}'.")
                    return
                data = self._path(number).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SessionError(
                    f"The session '{self.folder}' cannot be read: {(error.strerror or str(error)).lower()}."
                ) from error
            try:
                self.generation, (self.about, self.mark) = number, decode(data)
            except ValueError as error:
                raise damaged(self.folder) from error
            if self.about.pop(_FOLDER, None) != self._name:
                raise damaged(self.folder)
            return
        raise SessionError(f"The session '{self.folder}' changes all the time; retry later.")

    @property
    def _name(self) -> str:
        """The session's name, so that the file of another session is refused: the last two parts of the path."""
        return "/".join(self.folder.absolute().parts[-2:])

    def _overtaken(self) -> bool:
        """Return whether another program has continued or removed the session since this one read or saved it."""
        with suppress(OSError):  # if that cannot be read, the number was free
            found = generations(self.folder)
            if max(found, default=0) > self.generation + 1:  # the number had been used
                return True
            if self.mark:  # it was read or saved
                return self.generation not in found or _check_of(self._path(self.generation)) != self.mark.encode()
        return False

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_GENERATION}"

    def _followed(self) -> SessionBusy:
        return SessionBusy(
            f"The session '{self.folder}' was continued or removed by another program, so this turn is not saved; open "
            "it again to continue from what that program saved."
        )


def encode(about: dict[str, Any]) -> bytes:
    """Return the content of a reference's file."""
    data = json.dumps(about, separators=(",", ":")).encode()
    return data + b"\n" + _digest(data).encode()


def decode(content: bytes) -> tuple[dict[str, Any], str]:
    """Return the data and the mark of a reference's file. Raises ValueError for other bytes than were written."""
    data, _, check = content.rpartition(b"\n")
    mark = _digest(data)
    if mark.encode() != check:
        raise ValueError("another checksum")
    try:
        about = json.loads(data)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(about, dict):
        raise ValueError("no object")
    return about, mark


def generations(folder: Path) -> list[int]:
    """Return the numbers of the generations in a session's folder, which may be missing. Raises OSError."""
    try:
        stems = [path.stem for path in folder.iterdir() if path.suffix == _GENERATION]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def mentioned(folder: Path) -> bytes:
    """Return the bytes of a session's reference, of which the names of its blocks are a part. Raises OSError."""
    while number := max(generations(folder), default=0):
        with suppress(FileNotFoundError):  # a writer removed the number that was just found
            return (folder / f"{number}{_GENERATION}").read_bytes()
    return b""


def last_used(folder: Path) -> float:
    """Return the time of the last save or opening for writing, in seconds since 1970. Raises OSError."""
    paths = [folder / LOCK, *(folder / f"{number}{_GENERATION}" for number in generations(folder))]
    times = []
    for path in paths:
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times) if times else folder.stat().st_mtime


def in_use(folder: Path) -> bool:
    """Return whether a program on this machine has the session open for writing."""
    with suppress(OSError), (folder / LOCK).open("rb") as file:
        return not lock(file.fileno(), shared=True)
    return False


def remove_folder(folder: Path) -> None:
    """Remove a session's folder: the highest generation first, so that no earlier one comes back. Raises OSError."""
    for number in reversed(generations(folder)):
        (folder / f"{number}{_GENERATION}").unlink(missing_ok=True)
    for path in [*folder.iterdir()] if folder.is_dir() else []:
        path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def unwritable(path: Path, error: OSError) -> SessionUnwritable:
    """Return the error for a session that cannot be written."""
    reason = (error.strerror or str(error)).lower()
    remedy = "free some space, or name another" if error.errno in _FULL else "name another"
    return SessionUnwritable(f"The session '{path}' cannot be saved: {reason}; {remedy}.")


def damaged(path: Path) -> SessionDamaged:
    """Return the error for a reference whose bytes differ from those written."""
    return SessionDamaged(f"The session '{path}' cannot be read: it is damaged; start a new one.")


def _create(path: Path, data: bytes, locked: bool) -> None:
    """Create a file with its content at once. locked: no other program creates it. Raises FileExistsError if it exists,
    and OSError."""
    if hasattr(path, "create"):  # an object in a bucket
        path.create(data)
        return
    temporary = temporary_name(path.with_name("next"))  # one name for all numbers, so that files of dead ones go
    try:
        with open(temporary, "xb") as file:
            os.chmod(temporary, 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            if temporary.stat().st_nlink < 2:  # else a server of files did so, and its first answer was lost
                raise
        except OSError as error:
            if error.errno not in _LINKS_REFUSED or not locked or path.exists():
                raise
            os.rename(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync_name(path)


def _check_of(path: Path) -> bytes:
    return path.read_bytes().rpartition(b"\n")[2]


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_CHECK_BYTES).hexdigest()
