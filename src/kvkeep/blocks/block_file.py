"""The format of a block's file: named tensors with a checksum, which are mapped into memory and not copied.

A file has a header of fixed size (magic, length and CRC-32 of the description), the description (JSON), and the
tensors, each at a multiple of :data:`ALIGNMENT` bytes. The description has the block's name, so that a file under
another name is refused, the :func:`checksum` of all tensors, and for every tensor its dtype, shape and offset.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.errors import BlockDamaged, ran_out_of_memory
from kvkeep.files import lock

MAGIC = b"kvblock3"
HEADER = struct.Struct("<8sII")
"""Magic, bytes of the description, and its CRC-32."""
ALIGNMENT = 64
COLUMNS = 8191
"""Columns of words that a checksum sums."""
_POPULATE_READ = 22
"""Linux's advice to read a whole mapping. A disk's error is then one of this call, and no signal later."""
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}


Mappings = MutableMapping[Path, mmap.mmap]
"""The files that a program has mapped. Each is mapped once, so that caches share its memory."""


def encode(name: str, tensors: Mapping[str, Tensor]) -> tuple[int, Iterator[Any]]:
    """Return the size of a block's file in bytes, and its content in pieces."""
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
    return len(head) + place, iter((head, data))


def checksum(data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Return the checksum of bytes, whose number is a multiple of 8: the CRC-32 of the sums of :data:`COLUMNS` columns
    of 64-bit words. A changed word always changes a sum.
    COLUMNS is a prime, so that a page of memory that is moved adds to other columns."""
    words = data.view("<u8")
    whole = len(words) // COLUMNS * COLUMNS
    sums = np.add.reduce(words[:whole].reshape(-1, COLUMNS), axis=0, dtype=np.uint64)
    return zlib.crc32(words[whole:].tobytes(), zlib.crc32(sums.tobytes()))


def decode(path: Path, name: str, mappings: Mappings) -> dict[str, Tensor]:
    """Return the tensors of a block's file, which is mapped and its checksums compared unless it is in ``mappings``.
    Writing to a tensor changes this process's copy and never the file. Raises OSError if the file cannot be read, and
    BlockDamaged if its bytes differ from those that were written under ``name``."""
    if (known := mappings.get(path)) is not None:
        return parse(known, name, check=False)
    mapped = _mapped(path)
    tensors = parse(mapped, name)
    mappings[path] = mapped
    return tensors


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not os.fstat(file.fileno()).st_size:  # mmap refuses it
            raise BlockDamaged("is truncated")
        lock(file.fileno(), shared=True)  # the mapping keeps the file open, and with it the lock
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # A disk's error is raised here; later, in the mapping, it would end the program.
        try:
            _populate(mapped)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
            buffer = bytearray(1 << 20)  # the system is older than Linux 5.14
            while file.readinto(buffer):
                pass
        return mapped


def _populate(mapped: mmap.mmap) -> None:
    """Read a mapped file into memory. Raises OSError."""
    mapped.madvise(_POPULATE_READ)


def parse(mapped: mmap.mmap | bytearray, name: str, check: bool = True) -> dict[str, Tensor]:
    """Return the tensors of the content of a block's file, as views of it. check: compare checksums. Raises
    BlockDamaged."""
    if len(mapped) < HEADER.size:
        raise BlockDamaged("is truncated")
    magic, length, digest = HEADER.unpack_from(mapped)
    description = mapped[HEADER.size : HEADER.size + length]
    if magic != MAGIC or len(description) != length or zlib.crc32(description) != digest:
        raise BlockDamaged("has another header than kvkeep writes")
    try:
        return _described(mapped, json.loads(description), name, _up(HEADER.size + length), check)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        if ran_out_of_memory(error):
            raise
        raise BlockDamaged("has another description than kvkeep writes") from error


def _described(mapped: mmap.mmap | bytearray, about: Any, name: str, start: int, check: bool) -> dict[str, Tensor]:
    if about["name"] != name:
        raise BlockDamaged(f"is that of the block '{about['name']}'")
    if len(mapped) != start + about["bytes"]:
        raise BlockDamaged("is truncated")
    if check and checksum(np.frombuffer(mapped, np.uint8, offset=start)) != about["checksum"]:
        raise BlockDamaged("has other bytes than were written")
    tensors = {}
    for key, (dtype, shape, place) in about["tensors"].items():
        count = math.prod(shape)
        if min(shape, default=0) < 0 or not 0 <= place <= len(mapped) - start:
            raise ValueError("a shape")
        if not count:
            tensors[key] = torch.empty(shape, dtype=_DTYPES[dtype])
            continue
        tensors[key] = torch.frombuffer(mapped, dtype=_DTYPES[dtype], count=count, offset=start + place).view(shape)
    return tensors


def _up(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting, as opening a pipe of that name would."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
