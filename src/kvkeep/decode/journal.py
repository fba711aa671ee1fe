"""The journal: an append-only file of checksummed records, with one writer.

A record has a header of 32 bytes (kind, length, BLAKE2b of the payload, CRC-32 of the header) and a payload:

* a *page* holds bytes; it is valid after the next complete turn;
* a *lease* numbers a writer: a turn with a lower number than the last lease is void. A lease has 16 random bytes, the
  writer's mark. One more byte says that the writer has ended;
* a *turn* is the commit, written after everything before it was flushed to the disk.

A killed process leaves a truncated record, which is cut off. A complete record with wrong bytes is damage, and is
refused. The writer holds a lock, which the system releases when the process ends. It also checks its lease before every
turn, because a lock may not reach beyond one machine.
"""

from __future__ import annotations

import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import IO, Any, Self

from kvkeep.errors import SessionBusy, SessionDamaged, SessionError, SessionUnwritable
from kvkeep.files import write_whole

try:
    import fcntl
except ImportError:  # Windows: only leases keep writers apart
    fcntl = None  # type: ignore[assignment]

MAGIC = b"kvkeep4\n"
HEADER = struct.Struct("<4sQ16sI")
_PAGE, LEASE, _TURN = b"page", b"leas", b"turn"
NUMBER = struct.Struct("<Q")
MARK = 16
"""Bytes of a writer's mark."""
_LOCK_TIMEOUT_S = 0.1  # another process may hold the lock briefly to check whether the file is in use

Pieces = Iterable[Any]  # objects with bytes


def digest_of(pieces: Pieces) -> bytes:
    """Return a 16-byte BLAKE2b digest of the concatenated bytes of ``pieces``."""
    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


class Journal:
    """A journal open for reading.

    turns: payloads of all turns; pages: length and digest of each page by its offset; end: the offset after the last
    turn; mark: the last writer's mark; released: whether that writer has ended. Raises SessionError for a file that is
    missing, is not a journal, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        if not self.path.is_file():
            raise SessionError(f"There is no session at '{path}': no such file.")
        try:
            self._file = FileIO(str(self.path), "r")
        except OSError as error:
            raise _unreadable(self.path, error) from error
        self._start()

    def _start(self) -> None:
        try:
            self._scan()
        except OSError as error:
            self._file.close()
            raise _unreadable(self.path, error) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def page(self, place: int) -> bytes:
        """Return the payload of the page at offset ``place``. Raises SessionError if its digest differs."""
        length, digest = self.pages[place]
        data = self._read(place + HEADER.size, length)
        if digest_of([data]) != digest:
            raise damaged(self.path)
        return data

    def _read(self, place: int, length: int) -> bytes:
        self._file.seek(place)
        data = self._file.read(length)
        while len(data) < length and (more := self._file.read(length - len(data))):
            data += more
        return data

    def _scan(self) -> None:
        """Read all records except the payloads of pages."""
        self.turns: list[bytes] = []
        self.pages: dict[int, tuple[int, bytes]] = {}
        self.end = self.lease = 0
        self.mark, self.released = b"", False
        size = self._file.seek(0, os.SEEK_END)
        start = self._read(0, len(MAGIC))
        if start != MAGIC:
            if not MAGIC.startswith(start):
                raise _foreign(self.path, start, self._read(0, 1024))
            return
        place = self.end = len(MAGIC)
        pending: dict[int, tuple[int, bytes]] = {}
        while (header := self._header(place, size)) is not None:
            kind, length, digest = header
            if kind == _PAGE:
                pending[place] = length, digest
            else:
                payload = self._read(place + HEADER.size, length)
                if digest_of([payload]) != digest:
                    raise damaged(self.path)
                (number,) = NUMBER.unpack_from(payload)
                if kind == LEASE:
                    self.lease = max(self.lease, number)
                    self.mark = payload[NUMBER.size :][:MARK]
                    self.released = len(payload) > NUMBER.size + MARK
                elif number == self.lease:  # else a later writer had followed
                    self.turns.append(payload[NUMBER.size :])
                    self.pages |= pending
                    self.end, pending = place + HEADER.size + length, {}
            place += HEADER.size + length
        self.released &= place == size

    def _header(self, place: int, size: int) -> tuple[bytes, int, bytes] | None:
        """Return kind, length and digest of the record at ``place``; None if it is truncated."""
        raw = self._read(place, HEADER.size)
        if len(raw) < HEADER.size:
            return None
        kind, length, digest, check = HEADER.unpack(raw)
        if zlib.crc32(raw[:-4]) != check or kind not in (_PAGE, LEASE, _TURN):
            if not any(raw) and not any(self._read(place, size - place)):
                return None  # after a power failure: space for a record whose bytes were never written
            raise damaged(self.path)
        if kind != _PAGE and length < NUMBER.size:
            raise damaged(self.path)
        return None if place + HEADER.size + length > size else (kind, length, digest)


class Writer(Journal):
    """The only writer of a journal. It creates a missing file, and cuts off everything after the last turn. A file
    without any turn is removed on close. Raises SessionError if another program writes, or if the file cannot be
    written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        try:
            self._file = _locked(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error
        self._named = True  # whether the file is at its path
        self._start()
        try:
            self._begin()
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error

    @classmethod
    def _on(cls, path: Path, file: FileIO, lease: int) -> Self:
        """Return a writer of an empty open file that will be moved to ``path``. lease: the last lease of the file
        there."""
        writer = cls.__new__(cls)
        writer.path, writer._file, writer._named = path, file, False
        writer._scan()
        writer.lease = lease
        writer._begin()
        return writer

    def _begin(self) -> None:
        """Append a lease after the last turn."""
        self._known = {digest: place for place, (_, digest) in self.pages.items()}
        self._fresh: list[int] = []
        self.lease += 1
        self._file.truncate(self.end)
        self._place = self.end
        if new := not self._place:
            self._write(MAGIC)
        self._lease_place, self.mark = self._place, os.urandom(MARK)
        self._record(LEASE, [NUMBER.pack(self.lease), self.mark])
        os.fsync(self._file.fileno())
        if new and self._named:
            sync_name(self.path)
        self.end, self._owns = self._place, False  # checked in every turn
        self._proof = self._read(self._lease_place, self.end - self._lease_place)

    def close(self) -> None:
        """Release the session."""
        if not self._file.closed:
            if not self.turns:
                with suppress(OSError):
                    if is_at(self._file, self.path):
                        self.path.unlink()
            self._file.close()

    def remove(self) -> None:
        """Remove the file, and release it."""
        self.path.unlink()
        self._file.close()

    def add(self, pieces: list[Any], digest: bytes) -> int:
        """Return the offset of a page with the bytes of ``pieces``; append the page if the file does not have it."""
        if digest not in self._known:
            if not self._fresh:
                self._check_lease()
            place = self._place
            length = self._record(_PAGE, pieces, digest)
            self.pages[place], self._known[digest] = (length, digest), place
            self._fresh.append(place)
        return self._known[digest]

    def commit(self, payload: bytes) -> None:
        """Append a turn, which makes ``payload`` and the pages added before it valid. Raises SessionError if another
        writer has followed."""
        os.fsync(self._file.fileno())
        self._check_lease()
        self._record(_TURN, [NUMBER.pack(self.lease), payload])
        os.fsync(self._file.fileno())
        self.turns.append(payload)
        self.end, self._fresh, self._owns = self._place, [], False

    def undo(self) -> None:
        """Remove everything added after the last turn."""
        for place in self._fresh:
            del self._known[self.pages.pop(place)[1]]
        self._fresh, self._place = [], self.end
        if self._owns:  # else nothing was written
            with suppress(OSError):
                self._file.truncate(self.end)
        self._owns = False

    def rewrite(self, fill: Callable[[Self], None]) -> None:
        """Replace the file, as one transaction, by one that ``fill`` writes and commits."""
        made: list[Self] = []

        def write(file: IO[bytes]) -> None:
            for earlier in made:  # write may run twice
                earlier._file.close()
            copy = FileIO(os.dup(file.fileno()), "r+")
            lock(copy)
            made[:] = [self._on(self.path, copy, self.lease)]
            fill(made[0])

        self._check_lease()
        try:
            write_whole(self.path, write)
        except BaseException:
            for one in made:
                one._file.close()
            raise
        self._file.close()
        self.__dict__ = made[0].__dict__
        self._named = True
        sync_name(self.path)  # before a turn is written to the new file

    def _record(self, kind: bytes, pieces: list[Any], digest: bytes | None = None) -> int:
        """Write a record; return the length of its payload."""
        length = sum(memoryview(piece).nbytes for piece in pieces)
        fields = (kind, length, digest or digest_of(pieces))
        head = HEADER.pack(*fields, 0)[:-4]
        self._write(head + zlib.crc32(head).to_bytes(4, "little"), *pieces)
        return length

    def _write(self, *pieces: Any) -> None:
        self._file.seek(self._place)
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                rest = rest[self._file.write(rest) :]
        self._place = self._file.tell()

    def _check_lease(self) -> None:
        """Raise SessionError unless the file is at its path, has this writer's lease, and ends with this writer's
        records."""
        if not self._named:
            return
        length = os.fstat(self._file.fileno()).st_size
        unchanged = length == self._place and self._read(self._lease_place, len(self._proof)) == self._proof
        self._owns = unchanged and is_at(self._file, self.path)
        if not self._owns:
            raise self._followed()

    def _followed(self) -> SessionBusy:
        return SessionBusy(
            f"The session '{self.path}' was taken over by another program, so this turn is not saved; open it again to "
            "continue from what it saved."
        )


def open_for_writing(path: Path) -> bool:
    """Return whether a process has the journal at ``path`` open for writing."""
    try:
        with FileIO(str(path), "r") as file:
            lock(file, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _locked(path: Path) -> FileIO:
    """Open ``path``, create it if missing, and lock it. Raises OSError; SessionBusy if another program holds the
    lock."""
    until = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666), "r+")
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(22, "Not a regular file", str(path))
            lock(file)
            if is_at(file, path):
                return file
        except BlockingIOError as error:
            if time.monotonic() > until:
                file.close()
                raise SessionBusy(
                    f"The session '{path}' is in use by another program; end that program, or name another session."
                ) from error
            time.sleep(_LOCK_TIMEOUT_S / 5)
        except BaseException:
            file.close()
            raise
        file.close()  # another process replaced or removed it


def lock(file: FileIO, *, shared: bool = False) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if another program holds the lock."""
    if fcntl is not None:
        try:
            fcntl.flock(file.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks: only leases keep writers apart
            return


def sync_name(path: Path) -> None:
    """Flush a file's name to the disk, if the system can flush folders."""
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def is_at(file: FileIO, path: Path) -> bool:
    """Return whether an open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def damaged(path: Path) -> SessionDamaged:
    """Return the error for a file whose bytes differ from those written."""
    return SessionDamaged(f"The session '{path}' cannot be read: it is damaged; start a new one.")


def _foreign(path: Path, start: bytes, more: bytes) -> SessionError:
    if start[:6] == MAGIC[:6] or b'"kvkeep":' in more:  # earlier formats were safetensors
        return SessionError(f"The session '{path}' was saved by another version of kvkeep; start a new one.")
    return SessionError(f"'{path}' is not a session of kvkeep; name another file.")


def _unreadable(path: Path, error: OSError) -> SessionError:
    return SessionError(f"The session '{path}' cannot be read: {(error.strerror or str(error)).lower()}.")


def unwritable(path: Path, error: OSError) -> SessionUnwritable:
    """Return the error for a file that could not be written."""
    return SessionUnwritable(f"The session cannot be written to '{path}': {(error.strerror or str(error)).lower()}.")
