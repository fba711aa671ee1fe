"""Numbers that kernels read on the device. A graph of CUDA repeats a pass with the memory that it had, so all of its
passes have to find equal numbers in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from kvkeep.errors import KvkeepError


class Constants:
    """Lists of numbers, in the order in which a pass gives them to its kernels."""

    def __init__(self) -> None:
        self.fixed = False
        """Whether a pass is captured: a graph would copy other numbers from the host's memory, when that is freed."""
        self._lists: list[tuple[list[int], Tensor]] = []
        self._next = 0

    def tensor(self, numbers: list[int], device: torch.device) -> Tensor:
        """Return the next list as a tensor: that of the pass before, if it is equal; else a copy from the host. Raises
        KvkeepError if they are :attr:`fixed`, and differ."""
        place, self._next = self._next, self._next + 1
        if not (place < len(self._lists) and self._lists[place][0] == numbers):
            if self.fixed:
                raise KvkeepError("A step that is captured gives its kernels other numbers than the steps before.")
            self._lists[place:] = [(numbers, sent(torch.tensor(numbers), device))]
        return self._lists[place][1]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use them for the pass in the block."""
        self._next = 0
        before = _used.set(self)
        try:
            yield
        finally:
            _used.reset(before)


_used: ContextVar[Constants | None] = ContextVar("kvkeep_constants", default=None)


def sent(part: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host does not wait for the copy; from memory that is not pinned, it might wait
    for everything that the device does."""
    if device.type == "cuda" and part.device.type == "cpu":
        part = part.pin_memory()
    return part.to(device, non_blocking=True)


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return numbers as an int64 tensor on a device, as :func:`sent` does."""
    if (kept := _used.get()) is not None:
        return kept.tensor(numbers, device)
    return sent(torch.tensor(numbers), device)
