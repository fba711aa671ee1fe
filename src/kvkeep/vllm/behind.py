"""Blocks written behind: a thread encodes and writes them, and a queue of bounded bytes is before it.

A step of the engine pays for a copy. When the queue is full, or the disk was a moment ago, a block is dropped and
counted: it costs a hit, and nobody waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkeep.errors import StoreError
from kvkeep.vllm.folder import BlockFolder, Name

log = logging.getLogger(__name__)

PAUSE_S = 10.0
"""Seconds for which nothing is written after a write that failed."""
END_S = 10.0
"""Seconds for which :meth:`WriteBehind.close` waits for what is queued."""

Encode = Callable[[np.ndarray], Sequence[Any]]


@dataclass
class Counts:
    """Blocks so far. saved: written; dropped: neither written nor waited for; failed: of these, for an error of the
    disk; removed: for the quota; loaded: read into the cache; bad: found missing or damaged when read."""

    saved: int = 0
    dropped: int = 0
    failed: int = 0
    removed: int = 0
    loaded: int = 0
    bad: int = 0


class WriteBehind:
    """Writes blocks to ``folder`` as ``encode`` gives them, from a queue of ``room`` bytes. counts: is added to."""

    def __init__(self, folder: BlockFolder, encode: Encode, room: int, counts: Counts) -> None:
        self.folder, self.encode, self.room, self.counts = folder, encode, room, counts
        self._queue: deque[tuple[Name, np.ndarray]] = deque()
        self._bytes = 0  # queued, or being written
        self._waiting: set[Name] = set()
        self._paused = 0.0  # until then
        self._ends = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvkeep-blocks", daemon=True)
        self._thread.start()

    def offer(self, name: Name, size: int, copy: Callable[[], np.ndarray]) -> bool:
        """Queue a block of ``size`` bytes, which ``copy`` returns as uint8, unless it waits already; return False where
        it is dropped."""
        with self._changed:
            if name in self._waiting:
                return True
            if self._ends or self._bytes + size > self.room or time.monotonic() < self._paused:
                self.counts.dropped += 1
                return False
        raw = copy()  # only this thread adds
        with self._changed:
            self._queue.append((name, raw))
            self._waiting.add(name)
            self._bytes += size
            self._changed.notify_all()
        return True

    def flush(self, seconds: float) -> bool:
        """Wait until all that was offered is written, for ``seconds`` at most; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        self.flush(END_S)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ends)
                if self._ends:
                    return
                name, raw = self._queue.popleft()
            try:
                self._write(name, raw)
            finally:
                with self._changed:
                    self._waiting.discard(name)
                    self._bytes -= raw.nbytes
                    self._changed.notify_all()

    def _write(self, name: Name, raw: np.ndarray) -> None:
        if time.monotonic() < self._paused:
            self.counts.dropped += 1
            return
        try:
            self.counts.removed += self.folder.write(name, self.encode(raw))
        except (OSError, StoreError) as error:
            self.counts.dropped += 1
            self.counts.failed += 1
            self._paused = time.monotonic() + PAUSE_S
            log.warning("Blocks are not kept for %.0f s: %s", PAUSE_S, error)
        except Exception:  # a thread that ended would drop everything in silence
            self.counts.dropped += 1
            self.counts.failed += 1
            log.exception("A block is not kept.")
        else:
            self.counts.saved += 1
