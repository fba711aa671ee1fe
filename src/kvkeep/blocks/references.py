"""References: small files that name a session's blocks.

A session is a folder of numbered files, its generations; the highest number counts. A file is JSON with a checksum, and
is never changed. A writer creates the next number, and fails if that number exists: then another program has continued
the session, and its turn counts. This needs no locks, so it also holds between machines that share a folder. On one
machine a lock tells a second program earlier that the session is in use.

Somebody may remove the folder of an open session, or put a backup in its place. The writer notices before its next
save, takes the lock of the folder that is there, and its session counts: no program can have continued it meanwhile.
What else lies in the folder stays there, is not read, and no link is followed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from kvkeep.errors import SessionBusy, SessionDamaged, SessionError, SessionUnwritable, SessionVersion, reason_of
from kvkeep.files import create_new, is_temporary, lock, sync_name, temporary_name
from kvkeep.private_files import check_kind, holds, is_file, keep_lock, kind_of, make_folder, open_lock, read_file

LOCK = "lock"
_GENERATION = ".json"
_SHARED = ".shared"
_FOLDER = "folder"
_CHECK_BYTES = 16
MAX_BYTES = 2**28
"""The maximum bytes of a reference: of 30 million token ids."""
MAX_GENERATION = 2**31 - 1
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LINKS_REFUSED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Reference:
    """The reference of one session in ``folder``.

    writing: open for writing, which creates a missing session; shared: other machines use the folder, so that no lock
    is held; create: creates a file, as :func:`create_file`; root: no folder below it may be a link. Raises SessionError
    if there is no such session, SessionDamaged if its bytes differ from those written, SessionVersion, SessionBusy if
    another program writes, and SessionUnwritable.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writing: bool = False,
        shared: bool = False,
        create: Callable[..., None] | None = None,
        root: Path | None = None,
    ) -> None:
        self.folder, self.writing, self._shared, self._root = folder, writing, shared, root
        self.about: dict[str, Any] | None = None
        """The saved data; None before the first save."""
        self.saves = 0
        """The number of saves."""
        self.mark = ""
        """The unique mark of the last save."""
        self._before = (0, "")
        """Number and mark of the generation that the next save follows; (0, "") if there is none."""
        self._lock: int | None = None
        self._closed, self._create = False, create or create_file
        if writing:
            self._open()
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
                if self.writing and self._in_place and not generations(self.folder):
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
        try:
            number = self._next()
        except OSError as error:
            raise unwritable(self.folder, error) from error
        if len(data) > MAX_BYTES or number > MAX_GENERATION:
            what = "its text is too long" if len(data) > MAX_BYTES else "it has too many saves"
            raise SessionUnwritable(f"The session '{self.folder}' cannot be saved: {what}; start a new one.")
        target = _file(self.folder, number)
        try:
            self._make_folder()
            self._create(target, data, self._lock is not None)
        except FileExistsError as error:
            raise self._followed() from error
        except OSError as error:
            raise unwritable(self.folder, error) from error
        try:
            if self._overtaken(number):
                raise self._followed()
            self._take(number, data)
        except (SessionBusy, MemoryError):  # a generation that this program does not know would look like another's
            with suppress(OSError):
                target.unlink()
            raise
        with suppress(OSError):
            for earlier in generations(self.folder):
                if earlier < number:
                    _file(self.folder, earlier).unlink()

    def renew(self, replaced: bool = False) -> bool:
        """Continue in the folder that is there, if that of this session was removed or replaced since it was opened or
        saved: take its lock, and follow an earlier generation, or none. replaced: it was, as the caller knows. Return
        whether it was. Raises SessionBusy if another program has or continued the session, and SessionUnwritable."""
        had_lock = self._lock is not None  # it has none if the disk was read-only
        try:
            if stale := not self._in_place:
                self._unlock()
                self._open()
            elif not replaced and (self._shared or max(generations(self.folder), default=0) == self._before[0]):
                return False  # where others may remove it, the removal counts
            number, data = newest(self.folder)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        found = (number, _mark(data))
        if number > self.saves or (number == self.saves and found != (number, self.mark)):
            raise self._followed()
        renewed, self._before = (stale and had_lock) or found != self._before, found
        return renewed

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

    @property
    def _in_place(self) -> bool:
        """Whether the lock, if one is needed, is that of the folder that is there. Raises OSError."""
        return self._shared or (self._lock is not None and holds(self._lock, self.folder / LOCK))

    def _open(self) -> None:
        try:
            if self._shared:
                return self._make_folder()
            for _ in range(100):
                self._lock = self._locked()
                if self._lock is not None:
                    return None
            raise OSError(errno.EAGAIN, "it changes all the time")
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _make_folder(self) -> None:
        if isinstance(self.folder, Path):
            make_folder(self.folder, self._root)
        else:  # of a bucket
            self.folder.mkdir()

    def _next(self) -> int:
        """Return the number of the next generation; those that something else has for a name are left out."""
        number = self.saves + 1
        while isinstance(self.folder, Path) and kind_of(_file(self.folder, number)) not in (None, "a file"):
            number += 1
        return number

    def _locked(self) -> int | None:
        """Return the open file that is locked; None if another program has removed it meanwhile."""
        path, until = self.folder / LOCK, time.monotonic() + 0.1
        self._make_folder()
        with suppress(FileNotFoundError):
            handle = open_lock(path)
            try:
                while not lock(handle):  # another process may hold it for a moment to see whether the session is in use
                    if time.monotonic() > until:
                        raise SessionBusy(
                            f"The session '{self.folder}' is in use by another program; end that program, or name "
                            "another session."
                        )
                    time.sleep(0.02)
                if keep_lock(handle, path):
                    os.utime(path)
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
            kind = SessionDamaged if error.errno == errno.EFBIG else SessionUnwritable  # nor can it be written then
            raise kind(f"The session '{self.folder}' cannot be read: {reason_of(error)}.") from error
        if number:
            self._take(number, data)
        elif not self.writing:
            raise SessionError(f"There is no session at '{self.folder}'.")

    def _take(self, number: int, data: bytes) -> None:
        """Be at a generation with the content ``data``. Raises SessionDamaged."""
        try:
            about, mark = decode(data)
            if about.get(_FOLDER, self._name) != self._name:
                raise ValueError("of another session")
        except ValueError as error:
            raise SessionDamaged(
                f"The session '{self.folder}' cannot be read: it is damaged; start a new one."
            ) from error
        if about.pop(_FOLDER, None) is None:
            raise SessionVersion(
                f"The session '{self.folder}' cannot be read: another version of kvkeep has saved it; use that "
                "version, or name another session."
            )
        self.saves, self.about, self.mark = number, about, mark
        self._before = number, mark

    @property
    def _name(self) -> str:
        """The session's name, so that the file of another session is refused: the last two parts of the path."""
        return "/".join(self.folder.absolute().parts[-2:])

    def _overtaken(self, number: int) -> bool:
        """Return whether another program has continued or removed the session since this one read or saved it; this one
        has saved ``number``."""
        with suppress(OSError):  # if that cannot be read, the number was free
            found, (before, mark) = generations(self.folder), self._before
            if max(found, default=0) > number:  # the number had been used
                return True
            if not before:  # it is new, whatever the number of its first save
                return found != [number]
            return before not in found or _mark(_content(_file(self.folder, before))) != mark
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
        found = [path for path in folder.iterdir() if path.suffix == _GENERATION and _NUMBER.fullmatch(path.stem)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(number for number in (int(path.stem) for path in found if _is_file(path)) if number <= MAX_GENERATION)


def newest(folder: Path) -> tuple[int, bytes]:
    """Return number and content of the last generation; (0, b"") if there is none. Raises OSError."""
    for _ in range(9):  # a writer may remove the number that was just found
        number = max(generations(folder), default=0)
        with suppress(FileNotFoundError):
            return number, _content(_file(folder, number)) if number else b""
    raise OSError(errno.EAGAIN, "it changes all the time")


def last_used(folder: Path) -> float:
    """Return the time of the last save or opening for writing, in seconds since 1970. Raises OSError."""
    times = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if is_own(path):
                times.append(path.stat().st_mtime)
    return max(times) if times else folder.stat().st_mtime


def in_use(folder: Path) -> bool:
    """Return whether a program on this machine has the session open for writing."""
    with suppress(OSError):
        check_kind(folder / LOCK)
        with (folder / LOCK).open("rb") as file:
            return not lock(file.fileno(), shared=True)
    return False


def is_own(path: Path) -> bool:
    """Return whether a path in a session's folder is that of a file of kvkeep."""
    stem, suffix = path.stem, path.suffix
    named = path.name == LOCK or suffix == _SHARED or (suffix == _GENERATION and _NUMBER.fullmatch(stem))
    return bool(named or is_temporary(path.name)) and _is_file(path)


def remove_folder(folder: Path) -> None:
    """Remove a session's folder: the highest generation first, so that no earlier one comes back. Raises OSError, also
    if it has files of others, which remain."""
    with suppress(FileNotFoundError):
        files = [path for path in folder.iterdir() if is_own(path)]
        for path in [*(_file(folder, number) for number in reversed(generations(folder))), *files]:
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
        with create_new(temporary) as file:
            os.chmod(temporary, 0o600)  # the umask may have taken from the user, too
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


def _is_file(path: Path) -> bool:
    return is_file(path) if isinstance(path, Path) else True  # an object of a bucket is a file


def _content(path: Path) -> bytes:
    return read_file(path, MAX_BYTES) if isinstance(path, Path) else path.read_bytes()


def _mark(content: bytes) -> str:
    """Return the mark of a reference's file, without checking it."""
    return content[-2 * _CHECK_BYTES :].decode(errors="replace")


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_CHECK_BYTES).hexdigest()
