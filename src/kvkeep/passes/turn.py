"""Whose turn it is: one thread at a time runs forward passes with a cache."""

from __future__ import annotations

import sys
import threading

from kvkeep.errors import UsageError

_RUNNING = ("torch.nn.modules.module", "torch._dynamo.eval_frame")
"""The code that calls a decoder, compiled or not: while a pass runs, its thread is within it."""


class Turn:
    """The thread whose forward pass uses a cache.

    torch's hooks miss interrupts, so a pass may end without :meth:`leave`. Its thread can go on then, and others can as
    soon as it runs no model.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    @property
    def mine(self) -> bool:
        """Whether it is this thread's turn."""
        return self._thread == threading.get_ident()

    def take(self) -> None:
        """Begin a pass. Raises UsageError during another thread's pass."""
        with self._lock:  # two threads may find the same turn over
            self.check()
            self._thread = threading.get_ident()

    def leave(self) -> None:
        """End this thread's turn, if it has it."""
        if self.mine:
            self._thread = None

    def check(self) -> None:
        """Raise UsageError during another thread's pass."""
        thread = self._thread
        if thread in (None, threading.get_ident()):
            return
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_globals.get("__name__") in _RUNNING:
                raise UsageError(
                    "The cache is in a forward pass of another thread, and two threads cannot use a cache at once; use "
                    "one cache for each thread, or wait for the end of the pass."
                )
            frame = frame.f_back
