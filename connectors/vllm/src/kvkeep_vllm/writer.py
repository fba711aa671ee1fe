"""Write-behind: a thread encodes and writes blocks from a queue of bounded size.

The engine's step only copies a block. While the queue is full, and for a while after a failed write, blocks are dropped
and counted. A dropped block costs a later cache hit; the engine never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvkeep.blocks.folder import BlockFolder, BlockName
from kvkeep.errors import StoreError
from kvkeep_vllm.transfers import Use

log = logging.getLogger(__name__)

PAUSE_S = 10.0
"""Seconds without writes after a failed write."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds that :meth:`BlockWriter.close` waits for queued blocks."""
MAX_USES = 1024
"""Maximum number of queued :class:`Use` notes."""

Encode = Callable[[Tensor], dict[str, Tensor]]


@dataclass
class Counts:
    """Numbers of blocks since the start."""

    saved: int = 0
    """Blocks written to the folder."""
    dropped: int = 0
    """Blocks discarded instead of written."""
    failed: int = 0
    """Blocks dropped because the disk reported an error; included in ``dropped``."""
    removed: int = 0
    """Blocks deleted to stay within the quota."""
    loaded: int = 0
    """Blocks read into vLLM's cache."""
    bad: int = 0
    """Blocks that were missing or damaged when read."""


class BlockWriter:
    """Writes blocks to ``folder`` in the form that ``encode`` returns, and updates ``counts``. capacity: bytes of the
    queue."""

    def __init__(self, folder: BlockFolder, encode: Encode, capacity: int, counts: Counts) -> None:
        self.folder, self.encode, self.capacity, self.counts = folder, encode, capacity, counts
        self._queue: deque[tuple[BlockName, Tensor, Sequence[BlockName]]] = deque()
        self._uses: deque[Use] = deque(maxlen=MAX_USES)
        self._waiting: dict[BlockName, int] = {}  # bytes, queued or being written
        self._paused = 0.0  # until then
        self._busy = self._ends = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvkeep-blocks", daemon=True)
        self._thread.start()

    def offer(self, name: BlockName, size: int, copy: Callable[[], Tensor], text: Sequence[BlockName] = ()) -> bool:
        """Queue a block unless it is queued already; return False if it is dropped. size: bytes; copy: returns them,
        (size,) uint8. text: the blocks of the request, as in :meth:`BlockFolder.write`."""
        with self._changed:
            if name in self._waiting:
                return True
            if self._ends or sum(self._waiting.values()) + size > self.capacity or time.monotonic() < self._paused:
                self.counts.dropped += 1
                return False
        raw = copy()  # only this thread adds
        with self._changed:
            self._queue.append((name, raw, text))
            self._waiting[name] = size
            self._changed.notify_all()
        return True

    def use(self, use: Use) -> None:
        """Record, after all queued blocks are written, that blocks were used."""
        with self._changed:
            self._uses.append(use)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all queued work; return whether it is done."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._uses or self._busy), seconds)

    def close(self) -> None:
        """Write queued blocks for up to CLOSE_TIMEOUT_S, drop the rest, and end the thread."""
        self.flush(CLOSE_TIMEOUT_S)
        with self._changed:
            self._ends = True
            if remaining := len(self._queue):
                self.counts.dropped += remaining
                log.warning("%d blocks were not written within %.0f s and are dropped.", remaining, CLOSE_TIMEOUT_S)
            self._queue.clear()
            self._uses.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

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
                self.folder.use(use.names, use.when)
            if block is not None:
                failed = not self._write(*block)
                with self._changed:
                    self.counts.dropped += failed
                    del self._waiting[block[0]]

    def _write(self, name: BlockName, raw: Tensor, text: Sequence[BlockName]) -> bool:
        """Write a block; return whether it is stored."""
        if time.monotonic() < self._paused:
            return False
        try:
            self.counts.removed += self.folder.write(name, self.encode(raw), text=text)
            self.counts.saved += 1
            return True
        except StoreError as error:
            log.warning("No blocks are written for %.0f s: %s", PAUSE_S, error)
        except Exception:  # otherwise the thread would end, and all later blocks would be dropped silently
            log.exception("No blocks are written for %.0f s.", PAUSE_S)
        self.counts.failed += 1
        self._paused = time.monotonic() + PAUSE_S
        return False
