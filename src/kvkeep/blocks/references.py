"""References: small files that name a session's blocks.

A session is a folder of numbered files, its generations; the highest number counts. A file is JSON with a checksum, and
is never changed. A writer locks the folder, writes the next number as a whole, and then removes the earlier ones.

Somebody may remove the folder of an open session, or put a backup in its place. The writer notices before its next
save, takes the lock of the folder that is there, and its session counts: no program can have continued it meanwhile.
What else lies in the folder stays there, is not read, and no link is followed.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from kvkeep.errors import SessionBusy, SessionDamaged, SessionError, SessionUnwritable, SessionVersion, reason_of
from kvkeep.files import (
    check_kind,
    holds,
    is_file,
    is_folder,
    is_temporary,
    lock,
    make_folder,
    read_file,
    sync_name,
    wait_for_lock,
    write_whole,
)

LOCK = "lock"
_GENERATION = ".json"
_FOLDER = "folder"
_CHECK_BYTES = 16
MAX_BYTES = 2**28
"""The maximum bytes of a reference: of 30 million token ids."""
MAX_GENERATION = 2**31 - 1
PATIENCE_S = 0.1
"""Seconds to wait for a lock: a program holds it for a moment to see whether a session is in use."""
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
_BLOCK = re.compile(r"[0-9a-fx][0-9a-f]{31}")
FIELDS: dict[str, Any] = {
    "fingerprint": str,
    "tokenizer": str | None,
    "family": str,
    "method": str,
    "budget": str | None,
    "options": dict,
    "entries": int | None,
    "chunk": int,
    "past": dict,
    "notes": dict,
    "ids": list,
    "blocks": list,
    "by_token": dict,
    "state": str,
    "state_bytes": int,
    "block_bytes": int,
    "created": float,
    "saved": float,
}
"""The data of a session by name (:meth:`kvkeep.blocks.sessions.StoredSession.save`), and their types."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SessionFiles:
    """The files of one session in the folder ``path``. A store elsewhere has a class with these methods, all of which
    raise OSError.

    root: the folder of the store; no folder below it may be a link.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path, self._root = path, root
        self.lock: int | None = None
        """The open file that is locked."""

    @property
    def name(self) -> str:
        """The session's name in its files, so that the file of another session is refused: the last two parts of the
        path."""
        return "/".join(self.path.absolute().parts[-2:])

    def exists(self) -> bool:
        """Return whether there is a folder, and no link to one."""
        return is_folder(self.path)

    def generations(self) -> list[int]:
        """Return the numbers of all generations in order."""
        try:
            found = [path for path in self.path.iterdir() if path.suffix == _GENERATION and is_file(path)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        numbers = [int(path.stem) for path in found if _NUMBER.fullmatch(path.stem)]
        return sorted(number for number in numbers if number <= MAX_GENERATION)

    def read(self, number: int) -> bytes:
        """Return the content of a generation."""
        return read_file(self._file(number), MAX_BYTES)

    def write(self, number: int, data: bytes) -> None:
        """Write a generation, as a whole or not at all."""
        write_whole(self._file(number), lambda file: file.write(data))
        sync_name(self._file(number))

    def remove(self, number: int) -> None:
        """Remove a generation, if it exists."""
        self._file(number).unlink(missing_ok=True)

    def hold(self) -> None:
        """Lock the session for this program; create its folder if it is missing. Raises SessionBusy."""
        for _ in range(100):
            make_folder(self.path, self._root)
            with suppress(FileNotFoundError):  # another program has removed it meanwhile
                try:
                    self.lock = wait_for_lock(self.path / LOCK, PATIENCE_S)
                except BlockingIOError:
                    raise SessionBusy(
                        f"The session '{self.path}' is in use by another program; end that program, or name another "
                        "session."
                    ) from None
                with suppress(OSError):
                    os.utime(self.path / LOCK)
                return
        raise OSError(errno.EAGAIN, "it keeps changing")

    def has_lock(self) -> bool:
        """Return whether this program's lock is that of the folder that is there."""
        return self.lock is not None and holds(self.lock, self.path / LOCK)

    def release(self) -> None:
        """Release the lock, if this program has it."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def in_use(self) -> bool:
        """Return whether a program has the session open for writing."""
        with suppress(OSError):
            check_kind(self.path / LOCK)
            with (self.path / LOCK).open("rb") as file:
                return not lock(file.fileno(), shared=True)
        return False

    def used(self) -> float:
        """Return the time of the last save or opening for writing, in seconds since 1970."""
        times = []
        for path in self.path.iterdir():
            with suppress(FileNotFoundError):
                if is_own(path):
                    times.append(path.stat().st_mtime)
        return max(times) if times else self.path.stat().st_mtime

    def rename(self, target: SessionFiles) -> None:
        """Give the session another name."""
        self.path.rename(target.path)

    def remove_all(self) -> None:
        """Remove the folder: the highest generation first, so that no earlier one comes back; and the owner's, if it
        is empty then. Files of others remain; then it raises OSError."""
        with suppress(FileNotFoundError):
            for number in reversed(self.generations()):
                self.remove(number)
            for path in [path for path in self.path.iterdir() if is_own(path)]:
                path.unlink(missing_ok=True)
            self.path.rmdir()
        if self._root is not None and self.path.parent.parent != self._root:
            with suppress(OSError):
                self.path.parent.rmdir()

    def _file(self, number: int) -> Path:
        return self.path / f"{number}{_GENERATION}"


class Reference:
    """The reference of one session.

    writing: open for writing, which creates a missing session. Raises SessionError if there is no such session,
    SessionDamaged if its bytes differ from those written, SessionVersion, SessionBusy if another program writes, and
    SessionUnwritable.
    """

    def __init__(self, files: SessionFiles, *, writing: bool = False) -> None:
        self.files, self.writing = files, writing
        self.about: dict[str, Any] | None = None
        """The saved data; None before the first save."""
        self.saves = 0
        """The number of saves."""
        self.mark = ""
        """The unique mark of the last save."""
        if writing:
            with self._writing():
                files.hold()
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
        try:
            with suppress(OSError, MemoryError):
                if not self.saves and self.files.has_lock() and not self.files.generations():
                    self.files.remove_all()
        finally:
            self.files.release()

    def commit(self, about: dict[str, Any]) -> None:
        """Save ``about`` (plain types) as the next generation. Raises SessionBusy and SessionUnwritable; the previous
        generation then counts."""
        data, number = encode(about | {_FOLDER: self.files.name}), self.saves + 1
        if len(data) > MAX_BYTES or number > MAX_GENERATION:
            what = "its text is too long" if len(data) > MAX_BYTES else "it has too many saves"
            raise SessionUnwritable(f"The session '{self.files.path}' cannot be saved: {what}; start a new one.")
        saved, mark = decode(data)  # a copy, made before the file is there
        with self._writing():
            self.files.write(number, data)
        del saved[_FOLDER]
        self.saves, self.about, self.mark = number, saved, mark
        with suppress(OSError):
            for earlier in self.files.generations():
                if earlier < number:
                    self.files.remove(earlier)

    def renew(self) -> bool:
        """Continue in the folder that is there, if that of this session was removed or replaced since it was opened or
        saved: take its lock, and follow an earlier generation, or none. Return whether it was. Raises SessionBusy if
        another program has or continued the session, and SessionUnwritable."""
        had_lock = self.files.lock is not None  # it has none if the disk was read-only
        with self._writing():
            if moved := not self.files.has_lock():
                self.files.release()
                self.files.hold()
            elif max(self.files.generations(), default=0) == self.saves:
                return False
            number, data = newest(self.files)
        found = (number, _mark(data))
        if number > self.saves or (number == self.saves and found != (number, self.mark)):
            raise SessionBusy(
                f"The session '{self.files.path}' was continued by another program, so this turn is not saved; open it "
                "again to continue from what that program saved."
            )
        return (moved and had_lock) or number != self.saves

    def discard(self) -> None:
        """Remove the only save of a session that this program has created."""
        with suppress(OSError):
            self.files.remove(self.saves)
        self.saves, self.about, self.mark = 0, None, ""

    def _read(self) -> None:
        """Read the last generation."""
        try:
            number, data = newest(self.files)
        except OSError as error:
            kind = SessionDamaged if error.errno == errno.EFBIG else SessionUnwritable  # nor can it be written then
            raise kind(f"The session '{self.files.path}' cannot be read: {reason_of(error)}.") from error
        if not number:
            if not self.writing:
                raise SessionError(f"There is no session at '{self.files.path}'.")
            return
        try:
            about, mark = decode(data)
            if about.get(_FOLDER, self.files.name) != self.files.name:
                raise ValueError("of another session")
        except ValueError as error:
            raise SessionDamaged(
                f"The session '{self.files.path}' cannot be read: it is damaged; start a new one."
            ) from error
        if about.pop(_FOLDER, None) is None:
            raise SessionVersion(
                f"The session '{self.files.path}' cannot be read: another version of kvkeep has saved it; use that "
                "version, or name another session."
            )
        self.saves, self.about, self.mark = number, about, mark

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise OSError of the block as SessionUnwritable."""
        try:
            yield
        except OSError as error:
            raise unwritable(self.files.path, error) from error


def encode(about: dict[str, Any]) -> bytes:
    """Return the content of a reference's file: JSON and its checksum."""
    data = json.dumps(about, separators=(",", ":")).encode()
    return data + b"\n" + _digest(data).encode()


def decode(content: bytes) -> tuple[dict[str, Any], str]:
    """Return the data and the mark of a reference's file. Raises ValueError if its checksum is wrong."""
    data, _, check = content.rpartition(b"\n")
    if (mark := _digest(data)).encode() != check:
        raise ValueError("another checksum")
    try:
        return dict(json.loads(data)), mark
    except (RecursionError, TypeError) as error:  # another program made it
        raise ValueError("too deep, or no object") from error


def checked(about: Any) -> dict[str, Any]:
    """Return a reference's data, whose fields have the right types. Raises SessionDamaged and SessionVersion."""
    if not isinstance(about, dict):
        raise damaged("it has no fields")
    check_version(about)
    for name, kind in FIELDS.items():
        value = about[name]
        if not isinstance(value, kind) or (isinstance(value, str) and not value.isprintable()):
            raise damaged(f"its '{name}' has another type")
    if not all(isinstance(key, str) and _BLOCK.fullmatch(key) for key in [*about["blocks"], about["state"]]):
        raise damaged("its names of blocks are invalid")
    length, rows, ids = about["past"].get("length"), about["past"].get("rows"), about["ids"]
    if not all(isinstance(row, list) and all(type(one) is int for one in row) for row in ids):
        raise damaged("its token ids are invalid")
    if type(length) is not int or any(len(row) != length for row in ids) or (length and len(ids) != rows):
        raise damaged("its token ids do not match its length")
    return about


def check_version(about: dict[str, Any]) -> None:
    """Raise SessionVersion unless a reference's data has the names that this version of kvkeep writes."""
    others, missing = sorted(map(str, set(about) - set(FIELDS))), sorted(set(FIELDS) - set(about))
    if not (others or missing):
        return
    name = ascii((others or missing)[0])[:40]
    what = f"has {name}, which this one does not know" if others else f"lacks {name}"
    raise SessionVersion(
        f"it was saved by another version of kvkeep (it {what}); use that version, or start a new session."
    )


def damaged(reason: str) -> SessionDamaged:
    """Return the error for a session whose checksum is right, but whose content kvkeep did not write."""
    return SessionDamaged(f"it is not as kvkeep writes it ({reason}); start a new one.")


def newest(files: SessionFiles) -> tuple[int, bytes]:
    """Return number and content of the last generation; (0, b"") if there is none. Raises OSError."""
    for _ in range(9):  # a writer may remove the number that was just found
        number = max(files.generations(), default=0)
        with suppress(FileNotFoundError):
            return number, files.read(number) if number else b""
    raise OSError(errno.EAGAIN, "it keeps changing")


def is_own(path: Path) -> bool:
    """Return whether a path in a session's folder is that of a file of kvkeep."""
    number = path.suffix == _GENERATION and _NUMBER.fullmatch(path.stem)
    return bool(number or path.name == LOCK or is_temporary(path.name)) and is_file(path)


def unwritable(path: Path, error: OSError) -> SessionUnwritable:
    """Return the error for a session that cannot be written."""
    remedy = "free some space, or name another" if error.errno in _FULL else "name another"
    return SessionUnwritable(f"The session '{path}' cannot be saved: {reason_of(error)}; {remedy}.")


def _mark(content: bytes) -> str:
    """Return the mark of a reference's file, without checking it."""
    return content[-2 * _CHECK_BYTES :].decode(errors="replace")


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_CHECK_BYTES).hexdigest()
