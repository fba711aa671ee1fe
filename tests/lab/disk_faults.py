"""Disk faults in a server: system calls on its files fail as those of a disk do, when the test says so."""

from __future__ import annotations

import builtins
import io
import mmap
import os
import random
import struct
from collections.abc import Callable
from typing import Any

NAMES = "open fsync link replace rename unlink utime mkdir rmdir listdir scandir stat chmod posix_fallocate truncate"
_STATE = struct.Struct("<iid")


class DiskFaults:
    """Shared by the test, which sets it, and the servers that it forks, whose calls fail. folder: the paths below which
    calls fail; calls on descriptors fail, too."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._memory = mmap.mmap(-1, 4096)

    def set(self, error: int, share: float) -> None:
        """Let a share of all calls fail with an ``errno``; 0: none."""
        _STATE.pack_into(self._memory, 0, error, self.count, share)

    @property
    def count(self) -> int:
        """The number of calls that have failed."""
        return int(_STATE.unpack_from(self._memory)[1])

    def install(self) -> None:
        """Replace the system calls of this process."""
        for name in NAMES.split():
            setattr(os, name, self._failing(getattr(os, name)))
        for module in (builtins, io):
            module.open = self._opening(io.open)  # type: ignore[attr-defined]

    def _fail(self, target: Any) -> None:
        error, count, share = _STATE.unpack_from(self._memory)
        if error and (isinstance(target, int) or self.folder in os.fspath(target)) and random.random() < share:
            _STATE.pack_into(self._memory, 0, error, count + 1, share)
            raise OSError(error, os.strerror(error), None if isinstance(target, int) else target)

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(target: Any = ".", *rest: Any, **options: Any) -> Any:
            self._fail(target)
            return call(target, *rest, **options)

        return failing

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        faults = self

        class Reading(io.FileIO):
            def readinto(self, *given: Any) -> Any:
                faults._fail(self.fileno())
                return super().readinto(*given)

        def opening(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            self._fail(file if isinstance(file, int | str | bytes | os.PathLike) else "")
            if mode == "rb" and not isinstance(file, int) and self.folder in os.fspath(file):
                return io.BufferedReader(Reading(file, opener=options.get("opener")))
            return call(file, mode, *rest, **options)

        return opening
