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
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from kvkeep.errors import SessionBusy, SessionDamaged, SessionError, SessionUnwritable, reason_of
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
    is held; create: creates a file, as :func:`create_file`. Raises SessionError if there is no such session,
    SessionDamaged if its bytes differ from those written, SessionBusy if another program writes, and SessionUnwritable.
    """

    def __init__(
        self, folder: Path, *, writing: bool = False, shared: bool = False, create: Callable[..., None] | None = None
    ) -> None:
        self.folder, self.writing = folder, writing
        self.about: dict[str, Any] | None = None
        """The saved data; None before the first save."""
        self.saves = 0
        """The number of saves."""
        self.mark = ""
        """The unique mark of the last save."""
        self._lock: int | None = None
        self._closed, self._create = False, create or create_file
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

    def close(self) -> None:
        """Release the session. A session without a save is removed."""
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(OSError, MemoryError):
                if self.writing and not generations(self.folder):
                    for path in self.folder.iterdir():
                        if path.name == LOCK or path.suffix == _SHARED:
                            path.unlink(missing_ok=True)
                    self.folder.rmdir()
        finally:
            if self._lock is not None:
                os.close(self._lock)

    def commit(self, about: dict[str, Any]) -> None:
        """Save ``about`` (plain types) as the next generation. Raises SessionBusy if another program has continued the
        session, and SessionUnwritable; the previous generation then counts."""
        data = encode(about | {_FOLDER: self._name})
        target = _file(self.folder, self.saves + 1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._create(target, data, self._lock is not None)
        except FileExistsError as error:
            raise self._followed() from error
        except OSError as error:
            raise unwritable(self.folder, error) from error
        if self._overtaken():
            with suppress(OSError):
                target.unlink()
            raise self._followed()
        try:
            self._take(self.saves + 1, data)
        except MemoryError:  # a generation that this program does not know would look like another program's
            with suppress(OSError):
                target.unlink()
            raise
        with suppress(OSError):
            for number in generations(self.folder):
                if number < self.saves:
                    _file(self.folder, number).unlink()

    def discard(self) -> None:
        """Remove the last save, which this program made. Those of other programs remain."""
        if self.mark:
            with suppress(OSError):
                _file(self.folder, self.saves).unlink(missing_ok=True)

    def share(self, key: str) -> None:
        """Note that another session is given the block ``key``, the state of a save. Raises SessionUnwritable."""
        try:
            with suppress(FileExistsError):
                self._create(self.folder / f"{key}{_SHARED}", b"", False)
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
        """Read the last generation."""
        try:
            number, data = newest(self.folder)
        except OSError as error:
            raise SessionError(f"The session '{self.folder}' cannot be read: {reason_of(error)}.") from error
        if number:
            self._take(number, data)
        elif not self.writing:
            raise SessionError(f"There is no session at '{self.folder}'.")

    def _take(self, number: int, data: bytes) -> None:
        """Be at a generation with the content ``data``. Raises SessionDamaged."""
        try:
            about, mark = decode(data)
            if about.pop(_FOLDER, None) != self._name:
                raise ValueError("of another session")
        except ValueError as error:
            raise SessionDamaged(
                f"The session '{self.folder}' cannot be read: it is damaged; start a new one."
            ) from error
        self.saves, self.about, self.mark = number, about, mark

    @property
    def _name(self) -> str:
        """The session's name, so that the file of another session is refused: the last two parts of the path."""
        return "/".join(self.folder.absolute().parts[-2:])

    def _overtaken(self) -> bool:
        """Return whether another program has continued or removed the session since this one read or saved it."""
        with suppress(OSError):  # if that cannot be read, the number was free
            found = generations(self.folder)
            if max(found, default=0) > self.saves + 1:  # the number had been used
                return True
            if not self.mark:  # it is new, whatever the number of its first save
                return found != [self.saves + 1]
            return self.saves not in found or not _file(self.folder, self.saves).read_bytes().endswith(
                self.mark.encode()
            )
        return False

    def _followed(self) -> SessionBusy:
        return SessionBusy(
            f"The session '{self.folder}' was continued or removed by another program, so this turn is not saved; open "
            "it again to continue from what that program saved."
        )


def encode(about: dict[str, Any]) -> bytes:
    """Return the content of a reference's file: JSON and its checksum."""
    data = json.dumps(about, separators=(",", ":")).encode()
    return data + b"\n" + _digest(data).encode()


def decode(content: bytes) -> tuple[dict[str, Any], str]:
    """Return the data and the mark of a reference's file. Raises ValueError for other bytes than were written."""
    data, _, check = content.rpartition(b"\n")
    if (mark := _digest(data)).encode() != check:
        raise ValueError("another checksum")
    try:
        return dict(json.loads(data)), mark
    except (RecursionError, TypeError) as error:  # another program made it
        raise ValueError("too deep, or no object") from error


def generations(folder: Path) -> list[int]:
    """Return the numbers of the generations in a session's folder, which may be missing. Raises OSError."""
    try:
        stems = [path.stem for path in folder.iterdir() if path.suffix == _GENERATION]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def newest(folder: Path) -> tuple[int, bytes]:
    """Return number and content of the last generation; (0, b"") if there is none. Raises OSError."""
    for _ in range(9):  # a writer may remove the number that was just found
        number = max(generations(folder), default=0)
        with suppress(FileNotFoundError):
            return number, _file(folder, number).read_bytes() if number else b""
    raise OSError(errno.EAGAIN, "it changes all the time")


def last_used(folder: Path) -> float:
    """Return the time of the last save or opening for writing, in seconds since 1970. Raises OSError."""
    times = []
    for path in folder.iterdir():
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
    with suppress(FileNotFoundError):
        for path in [*(_file(folder, number) for number in reversed(generations(folder))), *folder.iterdir()]:
            path.unlink(missing_ok=True)
        folder.rmdir()


def unwritable(path: Path, error: OSError) -> SessionUnwritable:
    """Return the error for a session that cannot be written."""
    remedy = "free some space, or name another" if error.errno in _FULL else "name another"
    return SessionUnwritable(f"The session '{path}' cannot be saved: {reason_of(error)}; {remedy}.")


def create_file(path: Path, data: bytes, locked: bool) -> None:
    """Create a file with its content at once. locked: no other program creates it. Raises FileExistsError if it exists,
    and OSError."""
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


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number}{_GENERATION}"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_CHECK_BYTES).hexdigest()
