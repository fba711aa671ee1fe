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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from kvkeep.errors import SessionBusy, SessionDamaged, SessionError, SessionUnwritable
from kvkeep.files import lock, sync_name, temporary_name, write_whole

if TYPE_CHECKING:
    from kvkeep.blocks.bucket import Bucket

LOCK = "lock"
_GENERATION = ".json"
_CHECK_BYTES = 16


class BucketGenerations:
    """The generations of one session in the bucket, which the local folder follows. key: that of its folder."""

    def __init__(self, bucket: Bucket, folder: Path, key: str) -> None:
        self.bucket, self.folder, self.key = bucket, folder, key

    def numbers(self) -> list[int]:
        """Return the numbers of the generations. Raises OSError."""
        return numbered(self.bucket.keys(self.key))

    def pull(self, numbers: Sequence[int] | None = None) -> None:
        """Make the local folder hold the last generation of the bucket alone. numbers: those in the bucket, if the
        caller has listed it. Raises OSError."""
        local = generations(self.folder)
        for _ in range(9):  # a writer may remove the number that was just found
            last = max(self.numbers() if numbers is None else numbers, default=0)
            if not last or last in local:
                break
            if (data := self.bucket.get(self._key(last))) is not None:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_whole(self.folder / file_name(last), partial(_write, data))
                break
            numbers = None
        else:
            raise OSError("it changes all the time; retry later")
        for number in local:
            if number != last:
                (self.folder / file_name(number)).unlink(missing_ok=True)
        if local and not last:  # another machine removed it
            with suppress(OSError):
                self.folder.rmdir()

    def create(self, number: int, data: bytes) -> None:
        """Create a generation. Raises FileExistsError if the number is taken, and OSError."""
        self.bucket.create(self._key(number), data)

    def remove(self, numbers: Iterable[int] | None = None) -> None:
        """Remove generations, the highest first; by default all. Raises OSError."""
        for number in sorted(self.numbers() if numbers is None else numbers, reverse=True):
            self.bucket.remove(self._key(number))

    def move(self, folder: Path) -> None:
        """Give the session the name of another local folder. Raises OSError."""
        for number in self.numbers():
            if (data := self.bucket.get(self._key(number))) is not None:
                self.bucket.put(f"{self.key.rpartition('/')[0]}/{folder.name}/{file_name(number)}", data)
        self.remove()

    def _key(self, number: int) -> str:
        return f"{self.key}/{file_name(number)}"


def _write(data: bytes, file: IO[bytes]) -> None:
    file.write(data)


class Reference:
    """The reference of one session in ``folder``.

    writing: open for writing, which creates a missing session; shared: other machines use the folder, so that no lock
    is held; bucket: the session's generations in a bucket, which count. Raises SessionError if there is no such
    session, SessionDamaged if its bytes differ from those written, SessionBusy if another program writes, and
    SessionUnwritable.
    """

    def __init__(
        self, folder: Path, *, writing: bool = False, shared: bool = False, bucket: BucketGenerations | None = None
    ) -> None:
        self.folder, self.writing, self._bucket = folder, writing, bucket
        self.about: dict[str, Any] | None = None
        """The saved data; None before the first save."""
        self.generation = 0
        """The number of saves."""
        self.mark = ""
        """The unique mark of the last save."""
        self._lock: int | None = None
        self.closed = False
        if writing:
            self._open(shared or bucket is not None)
        try:
            if bucket is not None:
                try:
                    bucket.pull()
                except OSError as error:
                    raise SessionError(f"The session '{folder}' cannot be read: {error}.") from error
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
        data = json.dumps(about, separators=(",", ":")).encode()
        check = _digest(data)
        target = self._path(self.generation + 1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            whole = data + b"\n" + check.encode()
            if self._bucket is not None:
                self._bucket.create(self.generation + 1, whole)
                write_whole(target, lambda file: file.write(whole))
                last = max(self._bucket.numbers(), default=0)
            else:
                _create(target, whole)
                last = max(generations(self.folder), default=0)
        except FileExistsError as error:
            raise self._followed() from error
        except OSError as error:
            raise unwritable(self.folder, error) from error
        if last > self.generation + 1:  # the number had been used
            target.unlink(missing_ok=True)
            if self._bucket is not None:
                self._bucket.remove([self.generation + 1])
            raise self._followed()
        self.generation, self.mark = last, check
        # The caller may change its lists afterwards.
        self.about = json.loads(data)
        for number in generations(self.folder):
            if number < self.generation:
                with suppress(OSError):
                    self._path(number).unlink()
                    if self._bucket is not None:
                        self._bucket.remove([number])

    def follows(self, mark: str) -> bool:
        """Return whether the session is as the program saved it that got ``mark``."""
        return self.mark == mark

    def remove(self) -> None:
        """Remove the session, and close it."""
        if self._bucket is not None:
            self._bucket.remove()
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
                data, _, check = self._path(number).read_bytes().rpartition(b"\n")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SessionError(
                    f"The session '{self.folder}' cannot be read: {(error.strerror or str(error)).lower()}."
                ) from error
            self.generation, self.mark = number, _digest(data)
            if self.mark.encode() != check:
                raise damaged(self.folder)
            try:
                self.about = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise damaged(self.folder) from error
            if not isinstance(self.about, dict):
                raise damaged(self.folder)
            return
        raise SessionError(f"The session '{self.folder}' changes all the time; retry later.")

    def _path(self, number: int) -> Path:
        return self.folder / file_name(number)

    def _followed(self) -> SessionBusy:
        return SessionBusy(
            f"The session '{self.folder}' was continued by another program, so this turn is not saved; open it again "
            "to continue from what that program saved."
        )


def generations(folder: Path) -> list[int]:
    """Return the numbers of the generations in a session's folder."""
    with suppress(OSError):
        return numbered(os.listdir(folder))
    return []


def numbered(names: Iterable[str]) -> list[int]:
    """Return the numbers of the generations among the names of files."""
    stems = [name.removesuffix(_GENERATION) for name in names if name.endswith(_GENERATION)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def file_name(number: int) -> str:
    """Return the name of a generation's file."""
    return f"{number}{_GENERATION}"


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
