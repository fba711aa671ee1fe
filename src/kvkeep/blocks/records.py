"""Records: small JSON objects by owner and name, in a folder of the store or in memory only.

A server records its answers, because a later request may name an earlier response, or send an earlier answer back. The
least recently used records are removed. A file begins with a digest of its record and its path, so that a damaged or
moved one is not read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from kvkeep.errors import reason_of
from kvkeep.files import make_folder, read_file, write_whole

log = logging.getLogger(__name__)

MAX_BYTES = 64_000_000
"""Bytes of all records in memory, and of all on disk."""
MAX_RECORD = 16_000_000
"""Bytes of one record; a larger one is not kept."""
_DIGEST_BYTES = 32


class Records:
    """Records in ``folder``, which is created with the first one; None: in memory only. Any thread may use them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self._lock = folder, Lock()
        self._known, self._bytes = OrderedDict[str, bytes](), 0

    def of(self, owner: str) -> OwnerRecords:
        """Return the records of one owner."""
        return OwnerRecords(self, owner)

    def known(self, path: str) -> bytes | None:
        """Return a record in memory by its path in the folder."""
        with self._lock:
            return self._known.get(path)

    def remember(self, path: str, content: bytes) -> None:
        """Keep a record in memory, and remove the least recently used ones over the limit."""
        with self._lock:
            self._bytes += len(content) - len(self._known.pop(path, b""))
            self._known[path] = content
            while self._bytes > MAX_BYTES:
                self._bytes -= len(self._known.popitem(last=False)[1])

    def forget(self, path: str) -> None:
        """Remove a record from memory, if it is there."""
        with self._lock:
            self._bytes -= len(self._known.pop(path, b""))

    def clear(self) -> None:
        """Remove all records. Raises OSError."""
        with self._lock:
            self._known.clear()
            self._bytes = 0
        for path in () if self.folder is None else self.folder.glob("*/*"):
            path.unlink(missing_ok=True)

    def evict(self, age: float | None) -> None:
        """Remove the records that were not used for ``age`` seconds (None: no limit), and the least recently used ones
        over the limit, from the folder and from memory. Raises OSError if it cannot be listed."""
        if self.folder is None:
            return
        found = list[tuple[float, int, Path]]()
        for path in self.folder.glob("*/*"):
            with suppress(OSError):  # another server removes it
                facts = path.lstat()
                found.append((facts.st_mtime, facts.st_size, path))
        total = sum(size for _, size, _ in found)
        for used, size, path in sorted(found):
            if total > MAX_BYTES or (age is not None and time.time() - used > age):
                with suppress(OSError):  # what cannot be removed, as a folder, keeps no other one
                    path.unlink(missing_ok=True)
                    total -= size
                    self.forget(path.relative_to(self.folder).as_posix())


@dataclass(frozen=True)
class OwnerRecords:
    """The records of one owner, by name."""

    records: Records
    owner: str

    def put(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record in the place of an earlier one. What cannot be written to the folder is in memory only."""
        path, content = self._path(name), json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        if len(content) > MAX_RECORD:
            return
        self.records.remember(path, content)
        if (folder := self.records.folder) is None:
            return
        try:
            make_folder((folder / path).parent, folder)
            write_whole(folder / path, lambda file: file.write(_digest(path, content) + content))
        except OSError as error:
            log.warning("An answer is not recorded on disk: %s.", reason_of(error))

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a record; None: there is none, or it cannot be read."""
        path, folder = self._path(name), self.records.folder
        content = self.records.known(path)
        if content is None and folder is not None:
            with suppress(OSError):
                content = _checked(path, read_file(folder / path, _DIGEST_BYTES + MAX_RECORD))
        if content is None:
            return None
        if folder is not None:
            with suppress(OSError):
                os.utime(folder / path)
        self.records.remember(path, content)
        found: dict[str, Any] = json.loads(content)
        return found

    def remove(self, name: str) -> None:
        """Remove a record, if it is there."""
        path = self._path(name)
        self.records.forget(path)
        if self.records.folder is not None:
            with suppress(OSError):
                (self.records.folder / path).unlink()

    def _path(self, name: str) -> str:
        return f"{self.owner}/{hashlib.sha256(name.encode()).hexdigest()[:40]}"


def _digest(path: str, content: bytes) -> bytes:
    return hashlib.sha256(path.encode() + b"\n" + content).digest()


def _checked(path: str, file: bytes) -> bytes | None:
    """Return the record in a file; None: it is damaged, or another one's."""
    content = file[_DIGEST_BYTES:]
    return content if file[:_DIGEST_BYTES] == _digest(path, content) else None
