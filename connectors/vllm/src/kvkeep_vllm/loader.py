"""A thread that reads blocks into vLLM's cache while the engine takes steps."""

from __future__ import annotations

import logging
import threading
from collections import deque

from kvkeep.blocks.folder import BlockFolder
from kvkeep.errors import StoreError
from kvkeep_vllm.codec import BlockCodec
from kvkeep_vllm.tensors import BlockTensors
from kvkeep_vllm.transfers import Load
from kvkeep_vllm.writer import Counts

log = logging.getLogger(__name__)


class BlockLoader:
    """Reads blocks of ``folder`` into ``tensors``, and updates ``counts``."""

    def __init__(self, folder: BlockFolder, codec: BlockCodec, tensors: BlockTensors, counts: Counts) -> None:
        self.folder, self.codec, self.tensors, self.counts = folder, codec, tensors, counts
        self._queue: deque[Load] = deque()
        self._loads = 0  # queued, or being read
        self._done: set[str] = set()
        self._bad: set[int] = set()
        self._ends = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvkeep-loads", daemon=True)
        self._thread.start()

    def start(self, load: Load) -> None:
        """Queue a load."""
        with self._changed:
            self._queue.append(load)
            self._loads += 1
            self._changed.notify_all()

    def finished(self, timeout_s: float = 0.0) -> tuple[set[str], set[int]]:
        """Return the requests whose loads ended since the last call, and the cache's blocks that could not be restored:
        the first bad block of a request and all after it. timeout_s: seconds to wait for a request."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._loads, timeout_s)
            found = self._done, self._bad
            self._done, self._bad = set(), set()
        return found

    def close(self) -> None:
        """End the thread after its current block."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ends)
                if self._ends:
                    return
                load = self._queue.popleft()
            good = 0
            try:
                good = self._read(load)
            except Exception:  # the request must not wait forever
                log.exception("Blocks could not be loaded.")
            with self._changed:
                self.counts.loaded += good
                self.counts.bad += good < len(load.blocks)
                self._bad.update(load.blocks[good:])
                self._done.add(load.request)
                self._loads -= 1
                self._changed.notify_all()

    def _read(self, load: Load) -> int:
        """Load the blocks; return the number of restored blocks."""
        for number, (name, block) in enumerate(zip(load.names, load.blocks, strict=True)):
            if self._ends:
                return number
            try:
                self.tensors.write(block, self.codec.decode(self.folder.read(name)))
            except StoreError as error:
                log.warning("vLLM computes a block again: %s", error)
                return number
        return len(load.blocks)
