"""Meters: bytes of workspace, peaks, and seconds of merging."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor


def nbytes(*tensors: Tensor | None) -> int:
    """Return the bytes of the elements of ``tensors`` (None: 0 bytes)."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def storage_bytes(*tensors: Tensor) -> int:
    """Return the bytes of the storages of ``tensors``. A view of a larger tensor has a larger storage."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def resident_now() -> int | None:
    """Return the resident set of this process in bytes, with mapped files; None if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


@dataclass
class Meter:
    """Counts a cache's temporary bytes and peaks, and its seconds of merging and of reading a text again."""

    workspace: int = 0
    """Bytes of temporary tensors of recall: rebuilt pages, residuals between layers."""
    peak_workspace: int = 0
    peak_cache: int = 0
    """The peak of the sum of resident, compressed and pending entries, in bytes."""
    merging_s: float = 0.0
    """Seconds of merging entries; on a GPU, seconds of launching that work."""
    reconstruction_s: float = 0.0
    """Seconds of reading a text again, to choose the resident entries."""

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Count the seconds of the block as merging."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.merging_s += time.perf_counter() - start

    @contextmanager
    def holding(self, *tensors: Tensor | None) -> Iterator[None]:
        """Count ``tensors`` as workspace while the block runs."""
        size = nbytes(*tensors)
        self.hold(size)
        try:
            yield
        finally:
            self.workspace -= size

    def hold(self, size: int) -> None:
        """Count ``size`` more bytes of workspace (negative: fewer)."""
        self.workspace += size
        self.peak_workspace = max(self.peak_workspace, self.workspace)

    def cache(self, size: int) -> None:
        """Record that the cache holds ``size`` bytes."""
        self.peak_cache = max(self.peak_cache, size)


@dataclass(frozen=True)
class Memory:
    """Bytes of a cache, measured from its tensors."""

    resident_bytes: int = 0
    """Entries that attention reads directly."""
    compressed_bytes: int = 0
    """Entries in a smaller form."""
    checkpoint_bytes: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    """Data from which evicted entries are rebuilt, by place."""
    bookkeeping_bytes: int = 0
    """Positions and tables, and windows and recurrent states kept at the ends of blocks."""
    peak_cache_bytes: int = 0
    """The peak of resident, compressed and pending entries."""
    peak_workspace_bytes: int = 0
    """The peak of temporary tensors of recall."""
    process_bytes: int | None = field(default=None, compare=False)
    """Memory of the whole process, including the model; None if the system does not report it. Reports that differ in
    this alone are equal: other work of the process changes it."""

    @property
    def bytes(self) -> int:
        """Bytes of the cache, without those on disk."""
        checkpoints = self.checkpoint_bytes["device"] + self.checkpoint_bytes["host"]
        return self.resident_bytes + self.compressed_bytes + self.bookkeeping_bytes + checkpoints

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        return asdict(self)
