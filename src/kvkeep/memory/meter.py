"""Counting bytes: what is held for a moment, and the most that was ever held at once; and seconds of merging."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor


def nbytes(*tensors: Tensor | None) -> int:
    """Return the bytes of the elements of ``tensors`` (None counts nothing)."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def storage_bytes(*tensors: Tensor) -> int:
    """Return the bytes of the memory behind ``tensors``, more than theirs where they are views of something larger."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@dataclass
class Meter:
    """Follows what one cache holds beside its stores, in bytes, and what it does beside a step.

    workspace: transients of recall (rebuilt pages, residuals on their way through the layers).
    peak_cache: the most that resident and compressed entries took together, the chunk in hand included.
    merging_s: seconds in which entries were put into others; with a GPU, in which that was asked for.
    """

    workspace: int = 0
    peak_workspace: int = 0
    peak_cache: int = 0
    merging_s: float = 0.0

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Count the seconds that the block takes as merging."""
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
        """Note that the cache holds ``size`` bytes right now."""
        self.peak_cache = max(self.peak_cache, size)


@dataclass(frozen=True)
class Memory:
    """What a cache holds, in bytes, measured from its tensors.

    resident_bytes: entries attention reads directly. compressed_bytes: entries kept in a smaller form.
    checkpoint_bytes: what evicted entries are rebuilt from, by place. bookkeeping_bytes: positions, tables.
    peak_cache_bytes: the most resident and compressed entries took at once, the chunk in hand included.
    peak_workspace_bytes: the most that recall held for a moment.
    """

    resident_bytes: int = 0
    compressed_bytes: int = 0
    checkpoint_bytes: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    bookkeeping_bytes: int = 0
    peak_cache_bytes: int = 0
    peak_workspace_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain types."""
        return asdict(self)
