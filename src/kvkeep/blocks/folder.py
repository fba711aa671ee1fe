"""A folder of blocks, one file each. Several programs may share it and its quota.

A block is a set of named tensors. Its file has a header of fixed size (magic, length and CRC-32 of the description),
the description (JSON), and the tensors, each at a multiple of :data:`ALIGNMENT` bytes. The description has the block's
name, so that a file under another name is refused, the :func:`checksum` of all tensors, and for every tensor its dtype,
shape and offset. A file is read into memory of this process: nothing that happens to it later changes the tensors.

Files are written atomically and never change. A file's modification time is the last use of the block, and its access
time is when the block's value falls to one (:mod:`~kvkeep.blocks.value`): systems change no access time that lies in
the future, and where they do, the least recently used blocks count as worth the least. A writer holds a lock until its
block is written, and counts the bytes of all files unless it was the last writer, so that the quota is never exceeded.
At the quota the blocks are removed that are worth the least. What else lies in the folder is neither counted nor
removed, and no link in it is followed.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from kvkeep.blocks.value import seconds_left
from kvkeep.errors import BlockDamaged, BlockMissing, BlockVersion, StoreError, ran_out_of_memory, reason_of
from kvkeep.files import check_kind, is_file, make_folder, open_file, sync_name, wait_for_lock, write_whole
from kvkeep.memory.places import MEMORY, Place

MAGIC = b"kvblock3"
_OTHER_VERSION = re.compile(rb"kvblock[0-9]")
HEADER = struct.Struct("<8sII")
"""Magic, bytes of the description, and its CRC-32."""
ALIGNMENT = 64
MAX_DESCRIPTION = 1 << 24
"""The maximum number of bytes of a description: a tensor takes about 60 of them."""
COLUMNS = 8191
"""Columns of words that a checksum sums."""
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
Content = np.ndarray[Any, np.dtype[np.uint8]]
"""The bytes of a block's file."""
SUFFIX = ".block"
LOCK = "bytes"
"""The name of the file that a writer locks, with a random mark of the last one; part of the store's format."""
_MARK_BYTES = 16
FREED_SHARE = 16
"""At the quota, 1/FREED_SHARE of it is freed at a time, because finding what is worth the least lists the folder."""
_KEY = re.compile(r"[0-9a-fx][0-9a-f]+")


# -- a block as a file --------------------------------------------------------------------------------------


def encode(name: str, tensors: Mapping[str, Tensor]) -> tuple[bytes, memoryview]:
    """Return the content of a block's file in two pieces."""
    table: dict[str, tuple[str, tuple[int, ...], int]] = {}
    place = 0
    for key, tensor in tensors.items():
        table[key] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place)
        place += _up(tensor.nbytes)
    data = np.zeros(place, np.uint8)
    for tensor, (_, _, start) in zip(tensors.values(), table.values(), strict=True):
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        data[start : start + len(content)] = content
    about = {"name": name, "bytes": place, "checksum": checksum(data), "tensors": table}
    description = json.dumps(about, separators=(",", ":")).encode()
    head = HEADER.pack(MAGIC, len(description), zlib.crc32(description)) + description
    head += bytes(_up(len(head)) - len(head))
    return head, data.data


def checksum(data: Content) -> int:
    """Return the checksum of bytes, whose number is a multiple of 8: the CRC-32 of the sums of :data:`COLUMNS` columns
    of 64-bit words. A changed word always changes a sum.
    COLUMNS is a prime, so that a page of memory that is moved adds to other columns."""
    words = data.view("<u8")
    rows = len(words) // COLUMNS * COLUMNS
    sums = np.add.reduce(words[:rows].reshape(-1, COLUMNS), axis=0, dtype=np.uint64)
    return zlib.crc32(words[rows:].tobytes(), zlib.crc32(sums.tobytes()))


def read(path: Path, home: Place) -> Content:
    """Return the content of a block's file, in new memory of ``home``, which maps. Raises OSError if the file cannot be
    read, StoreError if there is no memory for it, and BlockDamaged for a file that is none of kvkeep's."""
    with os.fdopen(open_file(path), "rb") as file:
        there, (_, length) = os.fstat(file.fileno()).st_size, described(file)
        if length != there:
            raise BlockDamaged("is truncated" if length > there else "is longer than was written")
        content: Content = home.allocate((length,), torch.uint8).numpy()
        file.seek(0)
        if file.readinto(content.data) != length:
            raise BlockDamaged("is truncated")
    return content


def parse(content: Content | bytearray, name: str) -> dict[str, Tensor]:
    """Return the tensors of the content of a block's file, as views of it, after comparing the checksums. Raises
    BlockDamaged if they are not those that were written under ``name``."""
    data: Content = np.frombuffer(content, np.uint8)
    about, start = _description(data[: HEADER.size].tobytes(), lambda size: data[HEADER.size :][:size].tobytes())
    try:
        return _described(data, about, name, start)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        raise BlockDamaged("has an invalid description") from error


def described(file: BinaryIO) -> tuple[str, int]:
    """Return the name of a block, and the bytes that its file should have; ``file`` is at its beginning. Raises
    BlockDamaged, and BlockVersion."""
    about, start = _description(file.read(HEADER.size), file.read)
    try:
        return str(about["name"]), start + int(about["bytes"])
    except (LookupError, ValueError, TypeError, OverflowError) as error:
        raise BlockDamaged("has an invalid description") from error


def _description(header: bytes, read: Callable[[int], bytes]) -> tuple[Any, int]:
    """Return the description behind ``header``, of which ``read`` returns so many bytes, and the place of the tensors.
    Raises BlockDamaged."""
    if len(header) < HEADER.size:
        raise BlockDamaged("is truncated")
    magic, length, digest = HEADER.unpack(header)
    if magic != MAGIC and _OTHER_VERSION.fullmatch(magic):
        raise BlockVersion(f"Another version of kvkeep has written it ({magic.decode()}).")
    if magic != MAGIC or length > MAX_DESCRIPTION:
        raise BlockDamaged("has an invalid header")
    description = read(length)
    if len(description) != length or zlib.crc32(description) != digest:
        raise BlockDamaged("has an invalid header")
    try:
        return json.loads(description), _up(HEADER.size + length)
    except (ValueError, RecursionError) as error:
        raise BlockDamaged("has an invalid description") from error


def _described(content: Content, about: Any, name: str, start: int) -> dict[str, Tensor]:
    if about["name"] != name:
        raise BlockDamaged(f"is that of the block '{about['name']}'")
    if len(content) != start + about["bytes"]:
        raise BlockDamaged("is truncated")
    if checksum(content[start:]) != about["checksum"]:
        raise BlockDamaged("differs from what was written")
    tensors = {}
    for key, (dtype, shape, place) in about["tensors"].items():
        count = math.prod(shape)
        if min(shape, default=0) < 0 or not 0 <= place <= len(content) - start:
            raise ValueError("a shape")
        if not count:
            tensors[key] = torch.empty(shape, dtype=_DTYPES[dtype])
            continue
        tensors[key] = torch.frombuffer(content, dtype=_DTYPES[dtype], count=count, offset=start + place).view(shape)
    return tensors


def _up(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


# -- the folder ----------------------------------------------------------------------------------------------


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

    def use(self, names: Sequence[BlockName], when: int | None = None, saved: int | None = None) -> int:
        """Record that blocks were used at ``when`` (ns since 1970; None: now); return how many of the first ones exist.
        saved: how many blocks this use saves from being computed; None: those that exist. Each counts as used a little
        before the one that it follows, because it is useless without that one."""
        when = time.time_ns() if when is None else when
        known: list[Any] = [*takewhile(bool, map(self._facts, names))]
        before, saved = 0, len(known) if saved is None else saved
        for number, (name, facts) in reversed([*enumerate(zip(names, known, strict=False))]):
            before = max(before, _worth(facts))  # that of the blocks after it, too
            with suppress(OSError):  # the folder is read-only, or another program has removed it
                self._mark_used(name, number, when, saved, before)
        return len(known)

    def _mark_used(self, name: BlockName, number: int, when: int, saved: int, before: float = -math.inf) -> None:
        """Set the times of the block ``number`` of a text. before: its :func:`_worth` so far. Raises OSError."""
        worth = when + int(1e9 * seconds_left(saved, (before - when) / 1e9))
        os.utime(self.path(name), ns=(worth - number, when - number))

    def _facts(self, name: BlockName) -> os.stat_result | None:
        """Return what the system knows about a block's file; None if there is none."""
        with suppress(OSError):
            facts = os.lstat(self.path(name))
            return facts if stat.S_ISREG(facts.st_mode) else None
        return None

    def fitting(self, count: int, size: int, others: int = 0) -> int:
        """Return how many of ``count`` blocks, of ``size`` bytes together, the quota keeps beside ``others`` bytes."""
        if self.quota is None:
            return count
        return min(count, max(0, self.quota - self.quota // FREED_SHARE - others) * count // max(size, 1))

    def size(self, name: BlockName) -> int:
        """Return the bytes of a block's file; 0 if there is none."""
        facts = self._facts(name)
        return 0 if facts is None else facts.st_size

    def shapes(self, name: BlockName) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a block's tensors, which are not read; none if its file cannot be read."""
        with suppress(OSError, StoreError, LookupError, TypeError, ValueError, AttributeError):
            with os.fdopen(open_file(self.path(name)), "rb") as file:
                about, _ = _description(file.read(HEADER.size), file.read)
            return {key: (*shape,) for key, (_, shape, _) in about["tensors"].items()}
        return {}

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
        """Return the tensors of the first blocks that can be read (:meth:`read`), and the error of the next one.
        Threads read them, because copying and comparing gigabytes keeps one processor busy for seconds."""
        blocks: list[dict[str, Tensor]] = []
        with ThreadPoolExecutor(torch.get_num_threads(), "kvkeep-blocks") as threads:
            reads: list[Future[dict[str, Tensor]]] = []
            try:
                with suppress(RuntimeError):  # the system starts no more threads: this one reads the rest
                    for name in names:
                        reads.append(threads.submit(self.read, name, home))
                blocks += (one.result() for one in reads)
                blocks += (self.read(name, home) for name in names[len(reads) :])
            except StoreError as error:
                return blocks, error
            finally:
                threads.shutdown(cancel_futures=True)
        return blocks, None

    def write(
        self, name: BlockName, tensors: Mapping[str, Tensor], replace: bool = False, text: Sequence[BlockName] = ()
    ) -> int:
        """Write a block unless it exists; return the number of blocks removed for it. replace: replace one that exists.
        text: the blocks of the text that is being written; none of them is removed for it, and the block is worth as
        much as all of them. Raises StoreError if it cannot be written, also for a block larger than the quota."""
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
                    self._total, gone = self._evict(size, spared=text)
                self._mark, self._total = secrets.token_bytes(_MARK_BYTES), self._total + size
                file.seek(0)
                file.write(self._mark)
                write_whole(path, lambda file: file.writelines(content))
                number = text.index(name) if name in text else len(text)
                self._mark_used(name, number, time.time_ns(), max(len(text), 1))
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
        """Return the names of all blocks, or of those that were not used for ``unused_s`` seconds, what is worth the
        least first."""
        until = math.inf if unused_s is None else time.time_ns() - unused_s * 1e9
        paths = [path for facts, path in self._by_worth() if facts.st_mtime_ns < until]
        return [BlockName(one.parents[1].relative_to(self.folder).as_posix(), one.stem) for one in paths]

    def count(self) -> tuple[int, int]:
        """Return the number of blocks and their bytes."""
        sizes = [facts.st_size for facts, _ in self._by_worth()]
        return len(sizes), sum(sizes)

    def evict(self, age: float | None = None) -> int:
        """Enforce the quota, and remove blocks that were not used for ``age`` seconds; return the number of removed
        blocks. Raises StoreError."""
        try:
            with suppress(FileNotFoundError), self._lock():
                oldest = None if age is None else time.time_ns() - age * 1e9
                return self._evict(0, oldest)[1]
        except OSError as error:
            raise StoreError(f"Blocks in '{self.folder}' cannot be removed: {reason_of(error)}.") from error
        return 0

    def _evict(self, size: int, oldest: float | None = None, spared: Sequence[BlockName] = ()) -> tuple[int, int]:
        """Remove the blocks that are worth the least until ``size`` bytes fit, and some more, and those not used since
        ``oldest`` (ns). spared: blocks that are not removed for their value. Return the remaining bytes and the number
        of removed blocks. Raises StoreError if ``size`` bytes do not fit then."""
        known, stays = self._by_worth(), {*map(self.path, spared)}
        total, gone, quota = sum(facts.st_size for facts, _ in known), 0, self.quota
        target = total if quota is None or total + size <= quota else min(quota - quota // FREED_SHARE, quota - size)
        for facts, path in known:
            if (total <= target or path in stays) and (oldest is None or facts.st_mtime_ns >= oldest):
                continue
            with suppress(OSError):  # it still counts
                path.unlink()
                total, gone = total - facts.st_size, gone + 1
        if size and quota is not None and total + size > quota:
            raise StoreError(f"Blocks in '{self.folder}' cannot be removed to make room for another.")
        return total, gone

    def _by_worth(self) -> list[tuple[os.stat_result, Path]]:
        """Return what the system knows about each block's file, and its path, what is worth the least first."""
        known: list[tuple[os.stat_result, Path]] = []
        for folder, _, files in os.walk(self.folder):
            *space, start = Path(folder).relative_to(self.folder).parts or ("",)
            for path in (Path(folder, file) for file in files if space):
                if path.suffix == SUFFIX and _KEY.fullmatch(path.stem) and path.stem[:2] == start:
                    with suppress(OSError):  # another program removed it
                        facts = path.lstat()
                        if stat.S_ISREG(facts.st_mode):
                            known.append((facts, path))
        return sorted(known, key=lambda one: (_worth(one[0]), one[1]))

    @contextmanager
    def _lock(self) -> Iterator[IO[bytes]]:
        """Keep other programs from writing within the block; yield the file that is locked."""
        handle = wait_for_lock(self.folder / LOCK)
        try:
            file = os.fdopen(handle, "r+b", buffering=0)
        except BaseException:  # out of memory: this process would wait for itself from now on
            os.close(handle)
            raise
        with file:
            yield file


def _worth(facts: os.stat_result) -> int:
    """Return when a block's value falls to one, in ns since 1970; its last use, where the system has changed that."""
    return max(facts.st_atime_ns, facts.st_mtime_ns)
