"""The file of a session: safetensors with one checksum over all of it.

The checksum (SHA-256) is the first entry of the header, at a fixed offset; it is taken over the whole file with zeros
at that offset. A file that differs in any bit is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep.errors import SessionError
from kvkeep.files import write_whole

FORMAT = 3

_BEFORE = b'{"__metadata__":{"checksum":"'
_BLANK = b"0" * 64
_PLACE = 8 + len(_BEFORE)  # of the checksum, behind the header's length
_BLOCK = 1 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SessionFile:
    """An open file with a valid checksum. about: the JSON beside the tensors; stored: shapes and dtypes by name."""

    def __init__(self, about: Any, file: Any) -> None:
        self.about, self._file = about, file
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        self.stored = {name: Stored(tuple(one.get_shape()), _DTYPES[one.get_dtype()]) for name, one in slices.items()}

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._file.get_tensor(name)


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
    """Write ``tensors`` (copied to the host one at a time) and ``about`` (plain types) to ``path`` atomically. Raises
    SessionError if the file cannot be written; the previous file then remains."""
    table = _table(tensors)
    metadata = {"checksum": _BLANK.decode(), "format": str(FORMAT), "kvkeep": json.dumps(about)}
    header = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def fill(file: IO[bytes]) -> None:
        digest = hashlib.sha256()
        for piece in (len(header).to_bytes(8, "little"), header, *map(_bytes, tensors.values())):
            digest.update(piece)
            file.write(piece)
        file.seek(_PLACE)
        file.write(digest.hexdigest().encode())

    try:
        write_whole(path, fill)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SessionError(f"The session cannot be written to '{path}': {reason}.") from error


def _table(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    table, stop = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise SessionError(f"The session cannot be saved: its file format has no {tensor.dtype} ('{name}').")
        start, stop = stop, stop + tensor.nbytes
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    return table


def _bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor, copied only if it is not contiguous on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[SessionFile]:
    """Yield the session file at ``path``. Raises SessionError if it is missing, damaged or of another version."""
    if not Path(path).is_file():
        raise SessionError(f"There is no session at '{path}': no such file.")
    with ExitStack() as stack:
        try:
            known, holds = _checked(path)
            if known and not holds:
                raise _damaged(path)
            file = stack.enter_context(safe_open(path, framework="pt"))
            metadata = file.metadata() or {}
            if not known or metadata["format"] != str(FORMAT):
                raise _foreign(path, metadata)
            session = SessionFile(json.loads(metadata["kvkeep"]), file)
        except OSError as error:
            raise SessionError(
                f"The session '{path}' cannot be read: {(error.strerror or 'it is damaged or cut short').lower()}."
            ) from error
        except (SafetensorError, KeyError, ValueError, RecursionError) as error:
            raise _damaged(path) from error
        yield session


def _checked(path: str | os.PathLike[str]) -> tuple[bool, bool]:
    """Return whether a file has a checksum at the offset of this version, and whether it is valid."""
    with open(path, "rb") as file:
        start = file.read(_PLACE)
        stated = file.read(len(_BLANK))
        digest = hashlib.sha256(start + _BLANK)
        while block := file.read(_BLOCK):
            digest.update(block)
    return start[8:] == _BEFORE, stated == digest.hexdigest().encode()


def _foreign(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> SessionError:
    if "kvkeep" not in metadata:
        return SessionError(f"'{path}' is not a session of kvkeep; name another file.")
    return SessionError(f"The session '{path}' was saved by another version of kvkeep; start a new one.")


def _damaged(path: str | os.PathLike[str]) -> SessionError:
    return SessionError(f"The session '{path}' cannot be read: it is damaged or cut short; start a new one.")
