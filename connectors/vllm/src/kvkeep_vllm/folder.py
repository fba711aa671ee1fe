"""A folder of blocks, one file each. Several programs may share it and its quota.

A file is a header and the payload. The digest in the header covers the block's name, so a renamed file is refused like
a damaged one. Files are written atomically, and a file's modification time is the last use of the block. A further file
contains the total of bytes; a writer locks it until its block is written, so the quota is never exceeded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvkeep.errors import StoreError
from kvkeep.files import write_whole

MAGIC = b"kvblock1"
HEADER = struct.Struct("<8sQ16s")  # magic, bytes of the payload, digest
SUFFIX = ".kv"
LEDGER = "bytes"
"""Name of the file with the total."""
_TOTAL = struct.Struct("<Q")
FREED_SHARE = 16
"""At the quota, 1/FREED_SHARE of it is freed at a time, because finding the oldest blocks lists the whole folder."""


class BlockName(NamedTuple):
    """The name of a block."""

    space: str
    """Its namespace: one or more words, separated by ``/``."""
    key: bytes
    """vLLM's hash of all tokens up to the end of the block."""


class BlockMissing(StoreError):
    """There is no such block."""


class BlockDamaged(StoreError):
    """The file of a block is damaged."""


class BlockFolder:
    """Blocks in ``folder``. quota: bytes of all files, headers included."""

    def __init__(self, folder: Path, quota: int) -> None:
        self.folder, self.quota = folder, quota
        self._counted = False  # this program does not trust a total that another one left

    def path(self, name: BlockName) -> Path:
        """Return the path of a block's file."""
        return self.folder / name.space / f"{name.key.hex()}{SUFFIX}"

    def has(self, name: BlockName) -> bool:
        """Return whether a block has a file, which may be damaged."""
        return os.path.exists(self.path(name))

    def use(self, name: BlockName, when: int) -> bool:
        """Record that a block was used at ``when`` (ns since 1970); return whether it exists."""
        try:
            os.utime(self.path(name), ns=(when, when))
        except FileNotFoundError:
            return False
        except OSError:  # the folder is read-only
            return self.has(name)
        return True

    def read(self, name: BlockName) -> memoryview:
        """Return the payload of a block. Raises BlockMissing if there is no file or it cannot be read, and BlockDamaged
        after removing a damaged file."""
        path = self.path(name)
        try:
            with open(path, "rb", opener=_open_nonblocking) as file:
                data = file.read() or b""  # None for a pipe without a writer
        except OSError as error:
            raise BlockMissing(
                f"The block '{path}' cannot be read: {(error.strerror or str(error)).lower()}."
            ) from error
        payload = memoryview(data)[HEADER.size :]
        if data[: HEADER.size] != _header(name, [payload]):
            with suppress(OSError):
                path.unlink()
            raise BlockDamaged(f"The block '{path}' is damaged.")
        return payload

    def write(self, name: BlockName, payload: Sequence[Any]) -> int:
        """Write a block; return the number of blocks removed for it. payload: buffers, written one after the other.
        Raises OSError, and StoreError for a block larger than the quota."""
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
                total, gone = self._evict(size)
                self._counted = True
            _set_total(ledger, total + size)
            try:
                write_whole(path, lambda file: file.writelines([header, *payload]))
            except BaseException:
                _set_total(ledger, total)
                raise
        return gone

    def clear(self, space: str) -> None:
        """Remove all blocks of a namespace and of the namespaces within it."""
        for entry in _files(self.folder / space):
            with suppress(OSError):
                os.unlink(entry.path)

    def count(self) -> tuple[int, int]:
        """Return the number of blocks and their bytes."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._ledger():  # no program writes meanwhile
            sizes = [facts.st_size for _, facts in self._facts()]
        return len(sizes), sum(sizes)

    def _evict(self, size: int) -> tuple[int, int]:
        """Remove the least recently used blocks until ``size`` bytes fit, and some more. Return the remaining bytes and
        the number of removed blocks."""
        known = sorted((facts.st_mtime_ns, facts.st_size, path) for path, facts in self._facts())
        total, gone = sum(length for _, length, _ in known), 0
        if total + size <= self.quota:
            return total, 0
        target = min(self.quota - self.quota // FREED_SHARE, self.quota - size)
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
        """Lock the folder and yield the file with the total."""
        handle = os.open(self.folder / LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            with suppress(OSError):  # a file system without locks: each program then keeps the quota for itself
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting, as opening a pipe of that name would."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _header(name: BlockName, payload: Sequence[Any]) -> bytes:
    length = sum(memoryview(piece).nbytes for piece in payload)
    digest = hashlib.blake2b(digest_size=16)
    for piece in (MAGIC, f"{name.space}\0".encode(), name.key, *payload):
        digest.update(piece)
    return HEADER.pack(MAGIC, length, digest.digest())


def _total(ledger: IO[bytes]) -> int | None:
    ledger.seek(0)
    raw = ledger.read(_TOTAL.size)
    return int(_TOTAL.unpack(raw)[0]) if len(raw) == _TOTAL.size else None


def _set_total(ledger: IO[bytes], total: int) -> None:
    ledger.seek(0)
    ledger.write(_TOTAL.pack(total))


def _files(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield the files of all blocks in a folder and its subfolders."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
                elif entry.name.endswith(SUFFIX):
                    yield entry
    except OSError:  # the folder does not exist, or was removed meanwhile
        return
