"""SIGTERM, SIGHUP and a closed terminal during a conversation."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kvkeep.cli.standard_streams import output_error


class EndSignals:
    """Handle signals within the block. The first SIGTERM or SIGHUP sets a flag, so that an answer can be finished and
    saved. A second signal, or one during :meth:`exit_at_once`, exits immediately. The exit code is that of a shell for
    the signal.

    A closed terminal counts as SIGHUP: its reads and writes may fail before the signal arrives.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code, once a signal came."""
        self._exits = False
        self._terminal = sys.stdin is not None and sys.stdin.isatty()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> EndSignals:
        for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._previous[number] = signal.signal(number, self._end)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.received:
            output_error()  # prevents a flush to the closed terminal at exit
            if isinstance(error, OSError):
                raise SystemExit(self.code) from None

    @property
    def received(self) -> bool:
        """Whether a signal arrived or the terminal was closed."""
        if self.code is None and self._terminal and not os.isatty(0):
            self.code = 128 + signal.SIGHUP
        return self.code is not None

    @contextmanager
    def exit_at_once(self) -> Iterator[None]:
        """Raise SystemExit within the block on a signal, or on an earlier one."""
        self._exits = True
        try:
            self.exit_if_received()
            yield
        finally:
            self._exits = False

    def exit_if_received(self) -> None:
        """Raise SystemExit if a signal arrived or the terminal was closed."""
        if self.received:
            raise SystemExit(self.code)

    def _end(self, number: int, frame: FrameType | None) -> None:
        again = self.code is not None
        self.code = 128 + number
        if self._exits or again:
            raise SystemExit(self.code)
