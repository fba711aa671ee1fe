"""A folder of blocks, one file each. Several programs may share it and its quota.

Files are written atomically and never change. A file's modification time is the last use of the block. A writer holds
a lock until its block is written, and counts the bytes of all files unless it was the last writer, so that the quota is
never exceeded. At the quota the least recently used blocks are removed. Programs that use a block have read it into
their own memory. What else lies in the folder is neither counted nor removed, and no link in it is followed.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from kvkeep.blocks.block_file import Content, encode, parse, read
from kvkeep.errors import BlockDamaged, BlockMissing, BlockVersion, StoreError, reason_of
from kvkeep.files.atomic import sync_name, write_whole
from kvkeep.files.private import as_file, check_kind, is_file, make_folder, wait_for_lock
from kvkeep.memory.places import MEMORY, Place

SUFFIX = ".block"
LOCK = "bytes"
"""The name of the file that a writer locks, with a random mark of the last one; part of the store's format."""
_MARK_BYTES = 16
FREED_SHARE = 16
"""At the quota, 1/FREED_SHARE of it is freed at a time, because finding the oldest blocks lists the whole folder."""
SKEW_NS = 86400 * 10**9
"""A use that lies further in the future than this was noted by a clock that was wrong."""
FOREVER_S = 1e12
"""Seconds after which a use is no longer distinguished from an earlier one."""
_KEY = re.compile(r"[0-9a-fx][0-9a-f]+")


class BlockName(NamedTuple):
    """The name of a block."""

    space: str
    """Its namespace: one or more words, separated by ``/``."""
    key: str
    """Hexadecimal digits, unique in the namespace."""


class BlockFolder:
    """Blocks in ``folder``, which is created with the first one. quota: bytes of all files; None: no limit."""

    def __init__(self, folder: Path, quota: int | None = None) -> None:
        self.folder, self.quota = folder, quota
        self._mark: bytes | None = None  # the one that this program wrote last
        self._total = 0  # bytes of all files then
        self._in_memory: WeakValueDictionary[tuple[BlockName, str], Content] = WeakValueDictionary()

    def path(self, name: BlockName) -> Path:
        """Return the path of a block's file."""
        return self.folder / name.space / name.key[:2] / f"{name.key}{SUFFIX}"

    def has(self, name: BlockName) -> bool:
        """Return whether a block has a file, which may be damaged."""
        return is_file(self.path(name))

    def use(self, names: Sequence[BlockName], when: int | None = None) -> int:
        """Record that blocks were used at ``when`` (ns since 1970; None: now); return how many of the first ones exist.
        Each counts as used a little before the one that it follows, because it is useless without that one."""
        when = time.time_ns() if when is None else when
        for number, name in enumerate(names):
            if not self.has(name):
                return number
            try:
                os.utime(self.path(name), ns=(when - number, when - number))
            except FileNotFoundError:
                return number
            except OSError:  # the folder is read-only
                continue
        return len(names)

    def fitting(self, count: int, size: int, others: int = 0) -> int:
        """Return how many of ``count`` blocks, of ``size`` bytes together, the quota keeps beside ``others`` bytes."""
        if self.quota is None:
            return count
        return min(count, max(0, self.quota - self.quota // FREED_SHARE - others) * count // max(size, 1))

    def size(self, name: BlockName) -> int:
        """Return the bytes of a block's file; 0 if there is none."""
        with suppress(OSError):
            facts = os.lstat(self.path(name))
            return facts.st_size if stat.S_ISREG(facts.st_mode) else 0
        return 0

    def read(self, name: BlockName, home: Place = MEMORY) -> dict[str, Tensor]:
        """Return a block's tensors, in memory of ``home``, which maps. What this program holds of the block already is
        used again. The checksum is compared either way. Raises BlockMissing if there is no file or it cannot be read,
        and BlockDamaged, after removing the file, if its bytes are not those that were written."""
        if (known := self._in_memory.get((name, home.name))) is not None:
            with suppress(BlockDamaged):
                return parse(known, name.key)
        path = self.path(name)
        try:
            content = read(path, home)
            tensors = parse(content, name.key)
        except BlockDamaged as error:
            BlockFolder.remove(self, name)  # this file only
            raise BlockDamaged(f"The block '{path}' is removed: its file {error}.") from error
        except (OSError, StoreError) as error:
            reason = str(error) if isinstance(error, StoreError) else f"{reason_of(error)}."
            kind = BlockVersion if isinstance(error, BlockVersion) else BlockMissing
            raise kind(f"The block '{path}' cannot be read: {reason}") from error
        self._in_memory[name, home.name] = content
        return tensors

    def read_first(
        self, names: Sequence[BlockName], home: Place = MEMORY
    ) -> tuple[list[dict[str, Tensor]], StoreError | None]:
        """Return the tensors of the first blocks that can be read (:meth:`read`), and the error of the next one."""
        blocks: list[dict[str, Tensor]] = []
        for name in names:
            try:
                blocks.append(self.read(name, home))
            except StoreError as error:
                return blocks, error
        return blocks, None

    def write(self, name: BlockName, tensors: Mapping[str, Tensor], replace: bool = False) -> int:
        """Write a block unless it exists; return the number of blocks removed for it. replace: replace one that exists.
        Raises StoreError if it cannot be written, also for a block larger than the quota."""
        path = self.path(name)
        content = encode(name.key, tensors)
        size = sum(map(len, content))
        if self.quota is not None and size > self.quota:
            raise StoreError(f"A block of {size} bytes does not fit into a quota of {self.quota}.")
        gone = 0
        try:
            make_folder(path.parent, self.folder)
            check_kind(path)
            with self._lock() as file:
                if path.exists():
                    if not replace:
                        return 0
                    path.unlink()
                known = file.read(_MARK_BYTES) == self._mark
                if self.quota is not None and not (known and self._total + size <= self.quota):
                    self._total, gone = self._evict(size)
                self._mark, self._total = secrets.token_bytes(_MARK_BYTES), self._total + size
                file.seek(0)
                file.write(self._mark)
                write_whole(path, lambda file: file.writelines(content), private=True)
            sync_name(path)
        except OSError as error:
            raise StoreError(f"'{path}' cannot be written: {reason_of(error)}.") from error
        return gone

    def remove(self, name: BlockName) -> None:
        """Remove a block, if it exists."""
        with suppress(OSError):
            if self.has(name):
                self.path(name).unlink()

    def names(self, unused_s: float | None = None) -> list[BlockName]:
        """Return the names of all blocks, or of those that were not used for ``unused_s`` seconds, the least recently
        used first."""
        until = math.inf if unused_s is None else time.time_ns() - unused_s * 1e9
        paths = [Path(path) for used, _, path in self._by_use() if used < until]
        return [BlockName(one.parents[1].relative_to(self.folder).as_posix(), one.stem) for one in paths]

    def remove_folder(self) -> None:
        """Remove all blocks, and the folder unless it has other files. Raises OSError."""
        for path in [*map(Path, self._paths()), self.folder / LOCK]:
            if is_file(path):  # and no link, which is another's
                path.unlink(missing_ok=True)
        for folder, _, _ in [*os.walk(self.folder, topdown=False)]:
            with suppress(OSError):  # it has other files
                os.rmdir(folder)

    def count(self) -> tuple[int, int]:
        """Return the number of blocks and their bytes."""
        sizes = [size for _, size, _ in self._by_use()]
        return len(sizes), sum(sizes)

    def evict(self, age: float | None = None) -> int:
        """Enforce the quota, and remove blocks that were not used for ``age`` seconds; return the number of removed
        blocks. Raises StoreError."""
        try:
            with suppress(FileNotFoundError), self._lock():
                oldest = None if age is None else time.time_ns() - int(min(age, FOREVER_S) * 1e9)
                return self._evict(0, oldest)[1]
        except OSError as error:
            raise StoreError(f"Blocks in '{self.folder}' cannot be removed: {reason_of(error)}.") from error
        return 0

    def _evict(self, size: int, oldest: int | None = None) -> tuple[int, int]:
        """Remove the least recently used blocks until ``size`` bytes fit, and some more, and those not used since
        ``oldest`` (ns). Return the remaining bytes and the number of removed blocks. Raises StoreError if ``size``
        bytes do not fit then."""
        known = self._by_use()
        total, gone, quota = sum(length for _, length, _ in known), 0, self.quota
        target = total if quota is None or total + size <= quota else min(quota - quota // FREED_SHARE, quota - size)
        for used, length, path in known:
            if total <= target and (oldest is None or used >= oldest):
                continue
            with suppress(OSError):  # it still counts
                os.unlink(path)
                total, gone = total - length, gone + 1
        if size and quota is not None and total + size > quota:
            raise StoreError(f"Blocks in '{self.folder}' cannot be removed to make room for another.")
        return total, gone

    def _by_use(self) -> list[tuple[int, int, str]]:
        """Return time of use (ns), bytes and path of each block, the least recently used first. Times that lie in the
        future come before all others: the clock was wrong then, and is right now or was so since."""
        known: list[tuple[int, int, str]] = []
        for path in self._paths():
            with suppress(OSError):  # another program removed it
                facts = os.lstat(path)
                if stat.S_ISREG(facts.st_mode):
                    known.append((facts.st_mtime_ns, facts.st_size, path))
        until = time.time_ns() + SKEW_NS
        return sorted(known, key=lambda one: (one[0] <= until, one))

    def _paths(self) -> Iterator[str]:
        """Yield the path of each file with the name of a block."""
        for folder, _, files in os.walk(self.folder):
            for file in files:
                key, suffix = os.path.splitext(file)
                if suffix == SUFFIX and _KEY.fullmatch(key) and self._is_place(folder, key):
                    yield os.path.join(folder, file)

    def _is_place(self, folder: str, key: str) -> bool:
        """Return whether ``folder`` is that of the block ``key`` of some namespace."""
        *space, start = os.path.relpath(folder, self.folder).split(os.sep)
        return bool(space) and start == key[:2]

    @contextmanager
    def _lock(self) -> Iterator[IO[bytes]]:
        """Keep other programs from writing within the block; yield the file that is locked."""
        with as_file(wait_for_lock(self.folder / LOCK), "r+") as file:
            yield file
