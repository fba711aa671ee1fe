"""A file of JSON lines that many processes may append to, and that no kill can spoil.

A line is appended by one write, flushed to the disk, while a lock is held. A line that a kill or a full disk left torn
stays alone: the next one begins on a line of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock

from kvkeep.errors import StoreError


def append(path: Path, line: str) -> None:
    """Add one line, whole or not at all for whoever reads; raises StoreError where there is no room for it."""
    data = line.encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if _ends_torn(file):
                    data = b"\n" + data
                if os.write(file, data) < len(data):
                    raise OSError(0, "no space left on device")
                os.fsync(file)
            finally:
                os.close(file)
    except OSError as error:
        raise unwritable(path, error) from error


def whole(path: Path, start: int = 0) -> tuple[list[bytes], int]:
    """Return the whole lines from byte ``start`` on that are not empty, and where the next one begins; none of a file
    that does not exist. Raises StoreError where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    except OSError as error:
        raise StoreError(f"The results '{path}' cannot be read: {_reason(error)}.") from error
    data = data[: data.rfind(b"\n") + 1]  # what follows may still be on its way
    return [line for line in data.splitlines() if line.strip()], start + len(data)


def unwritable(path: Path, error: OSError) -> StoreError:
    """Return what to raise where ``path`` cannot be written."""
    return StoreError(f"The results '{path}' cannot be written: {_reason(error)}.")


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    if not size:
        return False
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) != b"\n"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
