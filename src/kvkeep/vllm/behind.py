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
from kvkeep.vllm.plan import Use

log = logging.getLogger(__name__)

PAUSE_S = 10.0
"""Seconds for which nothing is written after a write that failed."""
END_S = 10.0
"""Seconds for which :meth:`WriteBehind.close` waits for what is queued."""
USES = 1024
"""Texts in use that wait to be noted, at most."""

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
        self._uses: deque[Use] = deque(maxlen=USES)
        self._waiting: dict[Name, int] = {}  # bytes, queued or being written
        self._paused = 0.0  # until then
        self._busy = self._ends = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvkeep-blocks", daemon=True)
        self._thread.start()

    def offer(self, name: Name, size: int, copy: Callable[[], np.ndarray]) -> bool:
        """Queue a block of ``size`` bytes, which ``copy`` returns as uint8, unless it waits already; return False where
        it is dropped."""
        with self._changed:
            if name in self._waiting:
                return True
            if self._ends or sum(self._waiting.values()) + size > self.room or time.monotonic() < self._paused:
                self.counts.dropped += 1
                return False
        raw = copy()  # only this thread adds
        with self._changed:
            self._queue.append((name, raw))
            self._waiting[name] = size
            self._changed.notify_all()
        return True

    def use(self, use: Use) -> None:
        """Note, when all that is queued is written, that blocks are in use."""
        with self._changed:
            self._uses.append(use)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until all that was asked is done, for ``seconds`` at most; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._uses or self._busy), seconds)

    def close(self) -> None:
        """Write what is queued, for END_S, and end the thread; what is left then is dropped."""
        self.flush(END_S)
        with self._changed:
            self._ends = True
            if left := len(self._queue):
                self.counts.dropped += left
                log.warning("%d blocks were not written within %.0f s, and are dropped.", left, END_S)
            self._changed.notify_all()
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._uses or self._ends)
                if self._ends:
                    return
                self._busy = True
                block = self._queue.popleft() if self._queue else None
                use = self._uses.popleft() if block is None else None
            if use is not None:
                for number, name in enumerate(use.names):
                    self.folder.use(name, use.when - number)
            if block is not None:
                lost = self._failed(*block)
                with self._changed:
                    self.counts.dropped += lost
                    del self._waiting[block[0]]

    def _failed(self, name: Name, raw: np.ndarray) -> bool:
        """Write a block; return whether it is not there now."""
        if time.monotonic() < self._paused:
            return True
        try:
            self.counts.removed += self.folder.write(name, self.encode(raw))
            self.counts.saved += 1
            return False
        except (OSError, StoreError) as error:
            log.warning("Blocks are not kept for %.0f s: %s", PAUSE_S, error)
        except Exception:  # a thread that ended would drop everything in silence
            log.exception("Blocks are not kept for %.0f s.", PAUSE_S)
        self.counts.failed += 1
        self._paused = time.monotonic() + PAUSE_S
        return True
