"""A GGUF file: its metadata by key, the place of each tensor, and their values. Files that were split load as one.

The format is ggml's (docs/gguf.md there), versions 2 and 3, little-endian. Every count and length is compared with the
size of the file before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep.errors import ModelError, reason_of
from kvkeep.plugins import optional

_LENGTH = struct.Struct("<Q")
_FIXED = struct.Struct("<4sIQQ")
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: np.uint8, 1: np.int8, 2: np.uint16, 3: np.int16, 4: np.uint32, 5: np.int32, 6: np.float32, 7: np.bool_,
    10: np.uint64, 11: np.int64, 12: np.float64,
}  # fmt: skip
"""The types of numbers in metadata, by their number in a file."""
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_DEFAULT_ALIGNMENT = 32
_DIMENSIONS = 4
DECODED_ELEMENTS = 1 << 24
"""Elements that are read and decoded at a time."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    name: str
    kind: str
    """The kind of its blocks (Q4_1, F32)."""
    shape: tuple[int, ...]
    """The shape, rows first."""
    file: Path
    offset: int
    """Bytes before the tensor in the file."""
    size: int
    """Bytes of the tensor."""


@dataclass(frozen=True)
class Header:
    """All that a model's file, or its parts, state. The first part has all keys."""

    metadata: Mapping[str, Any]
    """Values by key: a number, a bool, a string, a numpy array of numbers, or a list of strings."""
    tensors: Mapping[str, FileTensor]
    """Tensors by name."""


def read_header(file: Path) -> Header:
    """Return the header of ``file``, and of all parts if it is one of several (``NAME-00001-of-00003.gguf``).

    Raises ModelError for a file that is not GGUF, of another version or byte order, cut short, with a key or a tensor
    twice, or without one of its parts.
    """
    parts = [_read(part) for part in parts_of(file)]
    metadata, tensors = dict(parts[0][0]), dict[str, FileTensor]()
    for number, (stated, found) in enumerate(parts):
        count, place = (
            one if type(one) is int else -1 for one in (stated.get("split.count", 1), stated.get("split.no", 0))
        )
        if (count, place) not in ((len(parts), number), (0, 0)):
            raise ModelError(
                f"The file '{file}' states that it is part {place + 1} of {count} of a model, and its name does not "
                "say so; give the parts their names back (NAME-00001-of-00003.gguf)."
            )
        if later := next((key for key in stated if key not in metadata), None):
            raise ModelError(
                f"Part {number + 1} of '{file}' states {later[:80]}, and the first part does not; fetch all again."
            )
        for name, tensor in found.items():
            if name in tensors:
                raise ModelError(f"The tensor {name} is in two parts of '{file}'; fetch the parts again.")
            tensors[name] = tensor
    return Header(metadata, tensors)


def parts_of(file: Path) -> tuple[Path, ...]:
    """Return the files of a model that ``file`` belongs to, in order: itself, or the parts that its name numbers.
    Raises ModelError if one is missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return (file,)
    stem, _, last = match.groups()
    parts = tuple(file.with_name(f"{stem}-{number:05}-of-{last}.gguf") for number in range(1, int(last) + 1))
    if file not in parts:
        raise ModelError(f"The name of '{file}' is of no part of a model (NAME-00001-of-00003.gguf); rename it.")
    for part in parts:
        if not part.is_file():
            raise ModelError(f"The model '{file}' has {int(last)} parts, and {part.name} is missing beside it.")
    return parts


def _read(file: Path) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(file, data).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"The file '{file}' cannot be read: {reason_of(error)}.") from error


def values(tensor: FileTensor) -> Tensor:
    """Return the values of ``tensor`` in its shape, float32. Raises ModelError for a file that is cut short."""
    gguf = optional("gguf", "gguf")
    kind = gguf.GGMLQuantizationType[tensor.kind]
    made = np.empty(tensor.shape, dtype=np.float32)
    flat = made.reshape(-1, tensor.shape[-1])
    count = len(flat)
    width, step = tensor.size // count, max(1, DECODED_ELEMENTS // tensor.shape[-1])
    for first in range(0, count, step):
        taken = min(step, count - first)
        rows = stored_bytes(tensor, first * width, taken * width).reshape(taken, width)
        flat[first : first + taken] = gguf.quants.dequantize(rows, kind)
    return torch.from_numpy(made)


def stored_bytes(tensor: FileTensor, offset: int, count: int) -> NDArray[np.uint8]:
    """Return ``count`` bytes of ``tensor`` from ``offset`` on. They are mapped: copy them before the file may change.
    Raises ModelError for a file that is cut short."""
    try:
        return np.memmap(tensor.file, np.uint8, "c", tensor.offset + offset, (count,)).view(np.ndarray)
    except ValueError as error:
        sentence = f"'{tensor.file}' is cut short: it ends within {tensor.name}; fetch it again."
        raise ModelError(sentence) from error


class _Cursor:
    """A place in the bytes of a file."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at, self.end = file, data, 0, len(data)

    def header(self) -> tuple[dict[str, Any], dict[str, FileTensor]]:
        magic, version, tensors, keys = _FIXED.unpack_from(self.data, self._take(_FIXED.size))
        if magic != b"GGUF":
            raise ModelError(f"The file '{self.file}' is not a GGUF file; give a GGUF file or a folder.")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            what = "is big-endian" if swapped else f"has version {version} of the format"
            raise ModelError(f"The file '{self.file}' {what}, and kvkeep reads little-endian files of version 2 or 3.")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._name()
            if key in metadata:
                raise self._damaged(f"it has the key {key[:80]} twice")
            metadata[key] = self._value(self._number(np.uint32), key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._damaged(f"its general.alignment is {str(alignment)[:20]}, which is not a power of two")
        found = list(self._tensors(tensors))
        start = -(-self.at // alignment) * alignment
        placed: dict[str, FileTensor] = {}
        for one in found:
            if one.name in placed:
                raise self._damaged(f"it has the tensor {one.name[:80]} twice")
            if (end := start + one.offset + one.size) > self.end:
                raise self._cut_short(end)
            placed[one.name] = replace(one, offset=start + one.offset)
        return metadata, placed

    def _tensors(self, count: int) -> Iterator[FileTensor]:
        gguf = optional("gguf", "gguf")
        for _ in range(count):
            name, dimensions = self._name(), self._number(np.uint32)
            if not 0 < dimensions <= _DIMENSIONS:
                raise self._damaged(f"{name[:80]} has {dimensions} dimensions")
            shape = tuple(int(self._number(np.uint64)) for _ in range(dimensions))[::-1]
            number, offset = int(self._number(np.uint32)), int(self._number(np.uint64))
            try:
                kind = gguf.GGMLQuantizationType(number)
                elements, size = gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise ModelError(
                    f"The tensor {name[:80]} of '{self.file}' has a kind of blocks (number {number}) that the "
                    "installed package gguf does not know; update it, or fetch the model in another quantisation."
                ) from None
            if shape[-1] % elements or not all(shape):
                raise self._damaged(f"{name[:80]} has a shape of {shape}, and {kind.name} has blocks of {elements}")
            bytes_ = math.prod(shape) // elements * size
            yield FileTensor(name, kind.name, shape, self.file, offset, bytes_)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = int(self._number(np.uint32)), int(self._number(np.uint64))
            if item == _STRING:
                return self._strings(count)
            dtype = self._dtype(item, key)
            return np.frombuffer(self.data, dtype, count, self._take(count * dtype.itemsize)).copy()
        return self._number(self._dtype(kind, key))

    def _dtype(self, kind: int, key: str) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise self._damaged(f"the value of {key[:80]} has the type {kind}")
        return np.dtype(_NUMBERS[kind])

    def _number(self, kind: Any) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.data, dtype, 1, self._take(dtype.itemsize))[0].item()

    def _strings(self, count: int) -> list[str]:
        """Return ``count`` strings. A vocabulary has hundreds of thousands."""
        if count * _LENGTH.size > self.end - self.at:
            raise self._cut_short(self.at + count * _LENGTH.size)
        data, at, end, unpack, found = self.data, self.at, self.end, _LENGTH.unpack_from, list[str]()
        try:
            for _ in range(count):
                after = at + 8 + unpack(data, at)[0]
                if after > end:
                    raise self._cut_short(after)
                found.append(data[at + 8 : after].decode())
                at = after
        except struct.error:
            raise self._cut_short(at + _LENGTH.size) from None
        except UnicodeDecodeError:
            raise self._damaged(f"a string at byte {at:,} is not UTF-8") from None
        self.at = at
        return found

    def _name(self) -> str:
        name = self._string()
        if not name.isprintable():
            raise self._damaged(f"it has a key or a tensor called {name[:80]!r}")
        return name

    def _string(self) -> str:
        return self._strings(1)[0]

    def _take(self, count: int) -> int:
        """Pass ``count`` bytes, and return where they begin."""
        start = self.at
        if start + count > self.end:
            raise self._cut_short(start + count)
        self.at += count
        return start

    def _cut_short(self, needed: int) -> ModelError:
        return ModelError(
            f"The file '{self.file}' is cut short: it has {self.end:,} bytes and needs at least {needed:,}; fetch it "
            "again."
        )

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"The file '{self.file}' is damaged: {what}; fetch it again.")
