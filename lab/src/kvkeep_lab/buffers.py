"""Tensors in a place, warm or cold: what has to be fetched, and from how far, is half of what a timing says.

Warm: what is read was read just before, and what is written is written again. Cold: what is read has left the CPU's
caches (and, on disk, the page cache), and what is written is memory that the allocator gave back to the system, so that
every page of it is a fault. The kernel's own counts (faults, bytes read from a device) tell whether that was so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import tempfile
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import StoreError
from kvkeep.memory.places import Disk, Place, place

SWEEP_BYTES = 128 << 20
"""Walked through to push everything else out of the CPU's caches; several times the largest."""


class Storage:
    """Tensors in one of the places that checkpoints live in; on disk as ``Disk`` does: mapped files without a name.

    ``Disk`` keeps no descriptor, and without one a file cannot be pushed out of memory; so files are mapped here.
    """

    def __init__(self, name: str, device: torch.device, folder: str | os.PathLike[str] | None = None) -> None:
        self.name = name
        self.home: Place = place(name, device, folder)
        self._files: list[tuple[Any, mmap.mmap]] = []

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` that lies here; raises StoreError where it cannot be kept."""
        if not isinstance(self.home, Disk):
            return self.home.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        try:
            file = tempfile.TemporaryFile(dir=self.home.folder)  # noqa: SIM115 - open until clear()
            file.write(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())  # a page that is not yet written cannot be dropped
            mapped = mmap.mmap(file.fileno(), tensor.nbytes)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise StoreError(f"Entries cannot be kept in '{self.home.folder}': {reason}.") from error
        self._files.append((file, mapped))
        return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)

    def drop_pages(self) -> None:
        """Push the files out of memory, where the system can be asked to."""
        for file, mapped in self._files:
            if hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fadvise"):
                mapped.madvise(mmap.MADV_DONTNEED)  # a mapped page would stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def clear(self) -> None:
        """Forget the files; the kernel frees them with the last tensor that looks at them."""
        for file, _ in self._files:
            file.close()
        self._files.clear()


class Sweep:
    """Makes all else cold: the CPU's (and the device's) caches hold other bytes, freed memory is the system's again."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.zeros(SWEEP_BYTES, dtype=torch.uint8)]
        if device.type != "cpu":
            self._buffers.append(torch.zeros(SWEEP_BYTES, dtype=torch.uint8, device=device))
        try:
            self._trim: Any = ctypes.CDLL(None).malloc_trim
        except (OSError, AttributeError, TypeError):  # not glibc: freed memory may be given out again, still mapped
            self._trim = lambda pad: 0

    def run(self) -> None:
        """Walk the buffers, and give freed memory back."""
        for buffer in self._buffers:
            buffer.add_(1)
        self._trim(0)


def faults() -> tuple[int, int]:
    """Return what this process has had so far: page faults without reading, and bytes read from block devices."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, 512 * usage.ru_inblock
