"""Tensors in a place, warm or cold, and the roofline of the machine: lower bounds of times from its matrix rate and
bandwidths.

Warm: the source was read immediately before, and the target was written before. Cold: the source is in none of the
CPU's caches (on disk, not in the page cache either), and the allocator has returned the target's memory to the system,
so that every page of it causes a fault. The kernel's counts (faults, bytes read from a device) confirm it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import StoreError, reason_of
from kvkeep.memory.places import Disk, Place, place
from kvkeep_lab.timing import synchronize

SWEEP_BYTES = 128 << 20
"""Bytes that are read to evict other data from the CPU's caches; several times the largest cache."""


class Storage:
    """Tensors in one place of checkpoints; on disk, mapped files without a name, as in ``Disk``.

    ``Disk`` keeps no descriptor, which is needed to drop a file from memory, so this class maps files itself.
    """

    def __init__(self, name: str, device: torch.device, folder: str | os.PathLike[str] | None = None) -> None:
        self.name = name
        self.home: Place = place(name, device, folder)
        self._files: list[tuple[Any, mmap.mmap]] = []

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` in this place. Raises StoreError if it cannot be stored."""
        if not isinstance(self.home, Disk):
            return self.home.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        try:
            file = tempfile.TemporaryFile(dir=self.home.folder)  # noqa: SIM115 - open until clear()
            file.write(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())  # an unwritten page cannot be dropped
            mapped = mmap.mmap(file.fileno(), tensor.nbytes)
        except OSError as error:
            raise StoreError(f"Entries cannot be kept in '{self.home.folder}': {reason_of(error)}.") from error
        self._files.append((file, mapped))
        return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)

    def drop_pages(self) -> None:
        """Drop the files from memory, if the system supports it."""
        for file, mapped in self._files:
            if hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fadvise"):
                mapped.madvise(mmap.MADV_DONTNEED)  # a mapped page would stay in memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def clear(self) -> None:
        """Close the files. The kernel frees each file with its last tensor."""
        for file, _ in self._files:
            file.close()
        self._files.clear()


class Sweep:
    """Makes all other data cold: fills the caches of CPU and device with other bytes, and returns freed memory to the
    system."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.zeros(SWEEP_BYTES, dtype=torch.uint8)]
        if device.type != "cpu":
            self._buffers.append(torch.zeros(SWEEP_BYTES, dtype=torch.uint8, device=device))
        try:
            self._trim: Any = ctypes.CDLL(None).malloc_trim
        except (OSError, AttributeError, TypeError):  # without glibc, freed memory may stay mapped
            self._trim = lambda pad: 0

    def run(self) -> None:
        """Read the buffers and return freed memory to the system."""
        for buffer in self._buffers:
            buffer.add_(1)
        self._trim(0)


def faults() -> tuple[int, int]:
    """Return this process's total counts of page faults without reading and of bytes read from block devices."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, 512 * usage.ru_inblock


COPY_BYTES = 64 << 20  # bytes of a copy; larger than the CPU's caches
PRODUCT_ROWS = 2048  # rows of a product


@dataclass(frozen=True)
class Roofline:
    """Measured rates of the machine."""

    flops: float
    """Operations per second of a product with the layer's widths."""
    bandwidth: dict[str, float]
    """Bytes per second read from each place and written to the device, from cold sources to allocated buffers."""

    def recompute_s(self, place: str, n: int, hidden: int, width: int, itemsize: int) -> float:
        """Return the seconds to fetch ``n`` residuals and to project them to keys and values of ``width`` elements per
        token."""
        return n * hidden * itemsize / self.bandwidth[place] + 2 * n * hidden * width / self.flops

    def read_s(self, place: str, n: int, width: int, itemsize: int) -> float:
        """Return the seconds to copy ``n`` tokens of keys and values."""
        return n * width * itemsize / self.bandwidth[place]

    def break_even(self, hidden: int, itemsize: int) -> float:
        """Return the bytes per second below which fetching entries takes longer than projecting residuals that are on
        the device. An element takes ``b / bandwidth`` or ``2 d / flops`` seconds."""
        return itemsize * self.flops / (2 * hidden)


@torch.inference_mode()
def roofline(
    storages: dict[str, Storage], sweep: Sweep, device: torch.device, dtype: torch.dtype, hidden: int, width: int
) -> Roofline:
    """Return the machine's roofline for products (n, hidden) x (hidden, width), and copies from every storage."""
    left = torch.randn(PRODUCT_ROWS, hidden, device=device, dtype=dtype)
    right = torch.randn(hidden, width, device=device, dtype=dtype)
    target = torch.zeros(COPY_BYTES // dtype.itemsize, device=device, dtype=dtype)
    seconds = _seconds(lambda: left @ right, device, lambda: None)
    bandwidth = {}
    for name, storage in storages.items():
        source = storage.put(torch.zeros_like(target))

        def cool(storage: Storage = storage) -> None:
            storage.drop_pages()
            sweep.run()

        def copy(source: torch.Tensor = source) -> object:
            return target.copy_(source)

        bandwidth[name] = COPY_BYTES / _seconds(copy, device, cool)
        del source, copy
        storage.clear()
    return Roofline(2 * PRODUCT_ROWS * hidden * width / seconds, bandwidth)


def _seconds(action: Callable[[], object], device: torch.device, prepare: Callable[[], object]) -> float:
    action()
    seconds = []
    for _ in range(9):
        prepare()
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)  # the minimum excludes other work of the machine
