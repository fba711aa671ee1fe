"""References: small files that name a session's blocks.

A session is a folder of numbered files, its generations; the highest number counts. A file is JSON with a checksum, and
is never changed. A writer creates the next number, and fails if that number exists: then another program has continued
the session, and its turn counts. This needs no locks, so it also holds between machines that share a folder. On one
machine a lock tells a second program earlier that the session is in use.
"""

from __future__ import annotations

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
_CHECK_BYTES = 16


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
        if self.writing and not self.generation and not generations(self.folder):
            with suppress(OSError):
                (self.folder / LOCK).unlink(missing_ok=True)
                self.folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)

    def commit(self, about: dict[str, Any]) -> None:
        """Save ``about`` (plain types) as the next generation. Raises SessionBusy if another program has continued the
        session, and SessionUnwritable; the previous generation then counts."""
        data = encode(about)
        target = self._path(self.generation + 1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _create(target, data)
        except FileExistsError as error:
            raise self._followed() from error
        except OSError as error:
            raise unwritable(self.folder, error) from error
        if (last := max(generations(self.folder), default=0)) > self.generation + 1:  # the number had been used
            target.unlink(missing_ok=True)
            raise self._followed()
        # The caller may change its lists afterwards.
        self.generation, (self.about, self.mark) = last, decode(data)
        for number in generations(self.folder):
            if number < self.generation:
                with suppress(OSError):
                    self._path(number).unlink()

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
            if shared:
                return
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
            if not _lock_patiently(self._lock):
                os.close(self._lock)
                raise SessionBusy(
                    f"The session '{self.folder}' is in use by another program; end that program, or name another "
                    "session."
                )
            os.utime(self.folder / LOCK)
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _read(self) -> None:
        for _ in range(9):  # a writer may remove the number that was just found
            number = max(generations(self.folder), default=0)
            if not number:
                if not self.writing:
                    raise SessionError(f"There is no session at '{self.folder}'.")
                return
            try:
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
            return
        raise SessionError(f"The session '{self.folder}' changes all the time; retry later.")

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_GENERATION}"

    def _followed(self) -> SessionBusy:
        return SessionBusy(
            f"The session '{self.folder}' was continued by another program, so this turn is not saved; open it again "
            "to continue from what that program saved."
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
    """Return the numbers of the generations in a session's folder."""
    with suppress(OSError):
        stems = [name.removesuffix(_GENERATION) for name in os.listdir(folder) if name.endswith(_GENERATION)]
        return sorted(int(stem) for stem in stems if stem.isdecimal())
    return []


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
    with suppress(OSError), open(folder / LOCK, "rb") as file:
        return not lock(file.fileno(), shared=True)
    return False


def remove_folder(folder: Path) -> None:
    """Remove a session's folder: the highest generation first, so that no earlier one comes back. Raises OSError."""
    for number in reversed(generations(folder)):
        (folder / f"{number}{_GENERATION}").unlink(missing_ok=True)
    for name in os.listdir(folder) if folder.is_dir() else []:
        (folder / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def unwritable(path: Path, error: OSError) -> SessionUnwritable:
    """Return the error for a session that cannot be written."""
    reason = (error.strerror or str(error)).lower()
    return SessionUnwritable(f"The session '{path}' cannot be saved: {reason}; free some space, or name another.")


def damaged(path: Path) -> SessionDamaged:
    """Return the error for a reference whose bytes differ from those written."""
    return SessionDamaged(f"The session '{path}' cannot be read: it is damaged; start a new one.")


def _create(path: Path, data: bytes) -> None:
    """Create a file with its content at once. Raises FileExistsError if it exists, and OSError."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            os.chmod(temporary, 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_name(path)


def _lock_patiently(descriptor: int) -> bool:
    """Lock a file; another process may hold the lock for a moment to see whether the session is in use."""
    until = time.monotonic() + 0.1
    while not lock(descriptor):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_CHECK_BYTES).hexdigest()
