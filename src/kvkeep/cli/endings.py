"""Endings: what a conversation does when its terminal is closed or somebody ends the process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Endings:
    """Within the block SIGTERM and SIGHUP raise a flag, so that what is under way can come to an end; while nothing is
    (:meth:`waiting`), and the second time, they end the program at once. The exit code is a shell's for the signal."""

    def __init__(self) -> None:
        self.code: int | None = None  # to leave with, once a signal came
        self._waits = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Endings:
        for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                self._before[number] = signal.signal(number, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def asked(self) -> bool:
        """Whether the program is asked to end."""
        return self.code is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block nothing is under way. Raises SystemExit as soon as a signal comes, or came before."""
        self._waits = True
        try:
            self.leave()
            yield
        finally:
            self._waits = False

    def leave(self) -> None:
        """Raise SystemExit if a signal came."""
        if self.code is not None:
            raise SystemExit(self.code)

    def _end(self, number: int, frame: FrameType | None) -> None:
        again = self.asked
        self.code = 128 + number
        if self._waits or again:
            raise SystemExit(self.code)
