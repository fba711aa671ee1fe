"""The format of a block's file: named tensors with a checksum. They are read into memory of this process, so that
nothing that happens to the file later changes them.

A file has a header of fixed size (magic, length and CRC-32 of the description), the description (JSON), and the
tensors, each at a multiple of :data:`ALIGNMENT` bytes. The description has the block's name, so that a file under
another name is refused, the :func:`checksum` of all tensors, and for every tensor its dtype, shape and offset.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from kvkeep.errors import BlockDamaged, BlockVersion, ran_out_of_memory
from kvkeep.files.private import open_file
from kvkeep.memory.places import Place

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
    whole = len(words) // COLUMNS * COLUMNS
    sums = np.add.reduce(words[:whole].reshape(-1, COLUMNS), axis=0, dtype=np.uint64)
    return zlib.crc32(words[whole:].tobytes(), zlib.crc32(sums.tobytes()))


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
        raise BlockDamaged("has another description than kvkeep writes") from error


def described(file: BinaryIO) -> tuple[str, int]:
    """Return the name of a block, and the bytes that its file should have; ``file`` is at its beginning. Raises
    BlockDamaged, and BlockVersion."""
    about, start = _description(file.read(HEADER.size), file.read)
    try:
        return str(about["name"]), start + int(about["bytes"])
    except (LookupError, ValueError, TypeError, OverflowError) as error:
        raise BlockDamaged("has another description than kvkeep writes") from error


def _description(header: bytes, read: Callable[[int], bytes]) -> tuple[Any, int]:
    """Return the description behind ``header``, of which ``read`` returns so many bytes, and the place of the tensors.
    Raises BlockDamaged."""
    if len(header) < HEADER.size:
        raise BlockDamaged("is truncated")
    magic, length, digest = HEADER.unpack(header)
    if magic != MAGIC and _OTHER_VERSION.fullmatch(magic):
        raise BlockVersion(f"Another version of kvkeep has written it ({magic.decode()}).")
    if magic != MAGIC or length > MAX_DESCRIPTION:
        raise BlockDamaged("has another header than kvkeep writes")
    description = read(length)
    if len(description) != length or zlib.crc32(description) != digest:
        raise BlockDamaged("has another header than kvkeep writes")
    try:
        return json.loads(description), _up(HEADER.size + length)
    except (ValueError, RecursionError) as error:
        raise BlockDamaged("has another description than kvkeep writes") from error


def _described(content: Content, about: Any, name: str, start: int) -> dict[str, Tensor]:
    if about["name"] != name:
        raise BlockDamaged(f"is that of the block '{about['name']}'")
    if len(content) != start + about["bytes"]:
        raise BlockDamaged("is truncated")
    if checksum(content[start:]) != about["checksum"]:
        raise BlockDamaged("has other bytes than were written")
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
