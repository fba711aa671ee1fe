"""A folder of blocks, one file each, within a quota of bytes that several programs keep together.

A file is a header and the payload. Its digest covers the block's name as well, so a file under another name is as bad
as one with a flipped byte. Files are written whole or not at all; the time of a file says when it was last used. The
total of bytes stands in a file of its own, under a lock that a writer holds until its block is written: so the quota is
never exceeded, however many programs write.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvkeep.decode.journal import digest_of
from kvkeep.errors import StoreError
from kvkeep.files import write_whole

MAGIC = b"kvblock1"
HEADER = struct.Struct("<8sQ16s")  # magic, bytes of the payload, digest
SUFFIX = ".kv"
LEDGER = "bytes"
"""The name of the file with the total."""
_TOTAL = struct.Struct("<Q")
ROOM = 16
"""When the quota is reached, a ROOM-th of it is made free at once: the folder is looked through for that."""


class Name(NamedTuple):
    """What a block is called: its namespace, one or more words with ``/`` between, and its key."""

    space: str
    key: bytes


class BlockMissing(StoreError):
    """There is no such block."""


class BlockDamaged(StoreError):
    """The file of a block is not as it was written."""


class BlockFolder:
    """Blocks in ``folder``, of ``quota`` bytes at most together, headers included."""

    def __init__(self, folder: Path, quota: int) -> None:
        self.folder, self.quota = folder, quota
        self._counted = False  # by this program, which does not trust what another one left

    def path(self, name: Name) -> Path:
        """Return where a block is, or would be."""
        return self.folder / name.space / f"{name.key.hex()}{SUFFIX}"

    def has(self, name: Name) -> bool:
        """Return whether there is a file for a block, good or not."""
        return os.path.exists(self.path(name))

    def use(self, name: Name, when: int) -> bool:
        """Note that a block was used, at ``when`` (ns since 1970); return whether it is there."""
        try:
            os.utime(self.path(name), ns=(when, when))
        except FileNotFoundError:
            return False
        except OSError:  # a folder that cannot be written
            return self.has(name)
        return True

    def read(self, name: Name) -> memoryview:
        """Return the payload of a block. Raises BlockMissing, also where it cannot be read, and BlockDamaged, and
        removes a damaged file."""
        path = self.path(name)
        try:
            with open(path, "rb", opener=_without_waiting) as file:
                data = file.read() or b""  # None of a pipe that nobody writes to
        except OSError as error:
            raise BlockMissing(f"There is no block at '{path}': {(error.strerror or str(error)).lower()}.") from error
        payload = memoryview(data)[HEADER.size :]
        if data[: HEADER.size] != _header(name, [payload]):
            with suppress(OSError):
                path.unlink()
            raise BlockDamaged(f"The block '{path}' is not as it was written.")
        return payload

    def write(self, name: Name, payload: Sequence[Any]) -> int:
        """Write a block, ``payload`` being objects with bytes, one after the other; return how many blocks made way
        for it. Raises OSError, and StoreError for a block larger than the quota."""
        path, size = self.path(name), HEADER.size + sum(memoryview(piece).nbytes for piece in payload)
        if size > self.quota:
            raise StoreError(f"A block of {size} bytes does not fit into a quota of {self.quota}.")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(parents=True, exist_ok=True)
        header, gone = _header(name, payload), 0
        with self._ledger() as ledger:
            if path.exists():
                return 0
            total = _total(ledger)
            if total is None or not self._counted or total + size > self.quota:
                total, gone = self._make_room(size)
                self._counted = True
            _set_total(ledger, total + size)
            try:
                write_whole(path, lambda file: file.writelines([header, *payload]))
            except BaseException:
                _set_total(ledger, total)
                raise
        return gone

    def clear(self, space: str) -> None:
        """Remove all blocks of a namespace, and of those that begin with it."""
        for entry in _files(self.folder / space):
            with suppress(OSError):
                os.unlink(entry.path)

    def count(self) -> tuple[int, int]:
        """Return the number of blocks and their bytes."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._ledger():  # nothing is written meanwhile
            sizes = [facts.st_size for _, facts in self._facts()]
        return len(sizes), sum(sizes)

    def _make_room(self, size: int) -> tuple[int, int]:
        """Remove the least recently used blocks until ``size`` fits, and more at once; return the bytes that are left,
        and how many are gone."""
        known = sorted((facts.st_mtime_ns, facts.st_size, path) for path, facts in self._facts())
        total, gone = sum(length for _, length, _ in known), 0
        if total + size <= self.quota:
            return total, 0
        target = min(self.quota - self.quota // ROOM, self.quota - size)
        for _, length, path in known:
            if total <= target:
                break
            with suppress(OSError):
                os.unlink(path)
                total, gone = total - length, gone + 1
        if total + size > self.quota:
            raise StoreError(f"Blocks in '{self.folder}' cannot be removed.")
        return total, gone

    def _facts(self) -> Iterator[tuple[str, os.stat_result]]:
        for entry in _files(self.folder):
            with suppress(OSError):  # another program removed it
                yield entry.path, entry.stat()

    @contextmanager
    def _ledger(self) -> Iterator[IO[bytes]]:
        """Hold the lock of the folder, and yield the file with its total."""
        handle = os.open(self.folder / LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            with suppress(OSError):  # a file system without locks: the quota is then each program's own
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; of something else that has its name, as a pipe, nothing is waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _header(name: Name, payload: Sequence[Any]) -> bytes:
    length = sum(memoryview(piece).nbytes for piece in payload)
    called = f"{name.space}\0".encode() + name.key
    return HEADER.pack(MAGIC, length, digest_of([MAGIC, called, *payload]))


def _total(ledger: IO[bytes]) -> int | None:
    ledger.seek(0)
    raw = ledger.read(_TOTAL.size)
    return int(_TOTAL.unpack(raw)[0]) if len(raw) == _TOTAL.size else None


def _set_total(ledger: IO[bytes], total: int) -> None:
    ledger.seek(0)
    ledger.write(_TOTAL.pack(total))


def _files(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield the files of all blocks in a folder and the folders in it."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
                elif entry.name.endswith(SUFFIX):
                    yield entry
    except OSError:  # removed meanwhile, or never there
        return
