"""The owner of a cache's forward pass: one thread at a time."""

from __future__ import annotations

import sys
import threading

from kvkeep.errors import UsageError

_RUNNING = ("torch.nn.modules.module", "torch._dynamo.eval_frame", "kvkeep.passes.graphs")
"""The code that calls a decoder, compiled or not, or a graph of it: while a pass runs, its thread is within it."""


class PassOwner:
    """The thread whose forward pass uses a cache.

    torch's hooks miss interrupts, so a pass may end without :meth:`leave`. Its thread can begin another one then, and
    others can as soon as that thread runs no model.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread is the owner."""
        return self._thread == threading.get_ident()

    def take(self) -> None:
        """Begin a pass. Raises UsageError during another thread's pass."""
        with self._lock:  # two threads may find that the owner's pass has ended
            self.check()
            self._thread = threading.get_ident()

    def leave(self) -> None:
        """End this thread's pass; another thread's goes on."""
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
