"""Places of checkpoints: on the model's device, in host memory, or in memory-mapped files on disk."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from kvkeep.errors import StoreError, reason_of, unknown
from kvkeep.files import make_folder
from kvkeep.memory import PLACES
from kvkeep.models.folders import cache_folder
from kvkeep.native.library import map_file


class Device:
    """Memory of a device. pinned: for copies to an accelerator."""

    def __init__(self, device: torch.device, name: str = "device", pinned: bool = False) -> None:
        self.device, self.name, self.pinned = device, name, pinned
        self.maps = device.type == "cpu" and not pinned
        """Whether a tensor that is mapped from a file can serve as one of this place."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of ``shape``."""
        return torch.empty(shape, dtype=dtype, device=self.device, pin_memory=self.pinned)


MEMORY = Device(torch.device("cpu"))
"""Memory of this process."""

_USED = set[Path]()
"""Folders in which this process could create files."""


class Disk:
    """Memory-mapped files without a name, so that a crash leaves none behind.

    A file is created without a directory entry and mapped; the kernel frees it with its last mapping, however the
    process ends. Space is reserved when a page is allocated, so a full disk is an error then and not a bus error later.
    What a failing disk does later, :mod:`~kvkeep.memory.disk_rows` notices.
    """

    name = "disk"
    maps = True

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        # The system's temporary folder is often in memory, so it is not used.
        self.folder = Path(folder) if folder is not None else cache_folder() / "checkpoints"
        if self.folder in _USED:  # a cache that is reset later, on a disk that fails, can still be made
            return
        try:
            if folder is None:
                make_folder(self.folder)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise self._refusal(error) from error
        _USED.add(self.folder)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of ``shape`` mapped from a new unnamed file."""
        elements = math.prod(shape)
        if not elements:  # which no system maps
            return torch.empty(shape, dtype=dtype)
        try:
            with self._file() as file:
                size = elements * dtype.itemsize
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
                mapped = self._mapped(file, size, dtype)
        except OSError as error:
            raise self._refusal(error) from error
        return mapped.view(shape)

    def _file(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(dir=self.folder)
        except FileNotFoundError:  # someone has removed the folder
            if self.folder != cache_folder() / "checkpoints":
                raise
            make_folder(self.folder)
            return tempfile.TemporaryFile(dir=self.folder)

    def _mapped(self, file: IO[bytes], size: int, dtype: torch.dtype) -> Tensor:
        try:
            if (buffer := map_file(file.fileno(), size)) is not None:
                return torch.frombuffer(buffer, dtype=dtype)
            # torch maps by path and keeps no descriptor: opening /dev/fd/N reopens the same file.
            path = f"/dev/fd/{file.fileno()}"
            return torch.from_file(path, shared=True, size=size // dtype.itemsize, dtype=dtype)
        except (OSError, RuntimeError) as error:  # the system maps no more files
            raise StoreError(
                f"A file in '{self.folder}' cannot be mapped: the process has reached the system's limit of "
                "mappings, or of address space. Use fewer or shorter texts at a time, or raise vm.max_map_count."
            ) from error

    def _refusal(self, error: OSError) -> StoreError:
        reason = "the disk is full" if error.errno == errno.ENOSPC else reason_of(error)
        return StoreError(
            f"Checkpoints cannot be kept in '{self.folder}': {reason}; name another folder with free space, or "
            "keep them in host memory."
        )


Place = Device | Disk


def place(name: str, device: torch.device, folder: str | os.PathLike[str] | None = None) -> Place:
    """Return the place ``name``. Only ``disk`` uses ``folder``."""
    if name == "device":
        return Device(device)
    if name == "host":
        return Device(torch.device("cpu"), name, pinned=device.type == "cuda")
    if name == "disk":
        return Disk(folder)
    raise unknown("place for checkpoints", name, PLACES)
