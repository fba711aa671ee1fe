"""SIGTERM and SIGHUP during a conversation."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class EndSignals:
    """Within the block the first SIGTERM or SIGHUP sets a flag, so that an answer can be finished and saved. A second
    one, or one while :meth:`exit_at_once`, exits at once. The exit code is a shell's for the signal."""

    def __init__(self) -> None:
        self.code: int | None = None  # exit code, once a signal came
        self._waits = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> EndSignals:
        for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def received(self) -> bool:
        """Whether a signal came."""
        return self.code is not None

    @contextmanager
    def exit_at_once(self) -> Iterator[None]:
        """Within the block a signal, also an earlier one, raises SystemExit."""
        self._waits = True
        try:
            self.exit_if_received()
            yield
        finally:
            self._waits = False

    def exit_if_received(self) -> None:
        """Raise SystemExit if a signal came."""
        if self.code is not None:
            raise SystemExit(self.code)

    def _end(self, number: int, frame: FrameType | None) -> None:
        again = self.received
        self.code = 128 + number
        if self._waits or again:
            raise SystemExit(self.code)
