"""A faster reader of GGUF headers, also for transformers.

gguf's reader and transformers' take several microseconds for each string of a header. A vocabulary of 150,000 tokens
and its merges have 300,000, which both read several times.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import ModelError
from kvkeep.extras import optional

_LENGTH = struct.Struct("<Q")


def open_gguf(file: Path) -> Any:
    """Return a ``gguf.GGUFReader`` of a file. Raises ModelError for a file that is cut off within its header or its
    tensors."""
    gguf = optional("gguf", "gguf")

    class Reader(optional("gguf", "gguf").GGUFReader):  # type: ignore[misc]
        data: Any

        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)  # whose slices take a fifth of the time
            _check_end(file, int(offset) + int(count) * np.dtype(dtype).itemsize, len(self.data))
            return super()._get(offset, dtype, count, **order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            start, count, item = orig_offs + 12, int(length[0]), gguf.GGUFValueType(kind[0])
            if item == gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            if item == gguf.GGUFValueType.STRING:
                parts, end = _strings(file, self.data, start, count)
            else:
                values = self._get(start, self.gguf_scalar_to_np[item], count)
                parts, end = list(values.reshape(count, 1)), start + values.nbytes
            types = [gguf.GGUFValueType.ARRAY, item] if count else [gguf.GGUFValueType.ARRAY]
            return end - orig_offs, [kind, length, *parts], list(range(2, 2 + count)), types

    return Reader(file)


@contextmanager
def parsed_once(file: Path, reader: Any) -> Iterator[None]:
    """Let transformers use ``reader`` of ``file`` within the block, plain bytes in its own reader, and one map of names
    for all modules. Otherwise it parses the file for the config and again for the tokenizer, and makes the map for each
    module."""
    import gguf
    from transformers.integrations.gguf import reader as header_reader

    def reader_of(path: Any) -> Any:
        return reader if os.path.samefile(path, file) else original(path)

    original, map_of, mapped = gguf.GGUFReader, gguf.get_tensor_name_map, header_reader._mapped
    gguf.GGUFReader, gguf.get_tensor_name_map, header_reader._mapped = reader_of, cache(map_of), _mapped
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, header_reader._mapped = original, map_of, mapped


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _strings(file: Path, data: NDArray[np.uint8], offset: int, count: int) -> tuple[list[memoryview], int]:
    """Return the bytes of each of ``count`` strings that begin at ``offset``, and the offset after them."""
    view, parts, end = data.data, list[memoryview](), len(data)
    for _ in range(count):
        _check_end(file, offset + 8, end)
        after = offset + 8 + _LENGTH.unpack_from(view, offset)[0]
        _check_end(file, after, end)
        parts.append(view[offset + 8 : after])
        offset = after
    return parts, offset


def _check_end(file: Path, needed: int, size: int) -> None:
    if needed > size:
        raise ModelError(
            f"The file '{file}' is cut short: it has {size:,} bytes and needs at least {needed:,}; fetch it again."
        )
