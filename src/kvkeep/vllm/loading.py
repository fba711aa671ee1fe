"""Blocks read by a thread into the cache, where the engine has made room for them; steps go on meanwhile."""

from __future__ import annotations

import logging
import threading
from collections import deque

from kvkeep.errors import StoreError
from kvkeep.vllm.behind import Counts
from kvkeep.vllm.codec import Codec
from kvkeep.vllm.folder import BlockFolder
from kvkeep.vllm.pages import Pages
from kvkeep.vllm.plan import Load

log = logging.getLogger(__name__)


class Loader:
    """Reads blocks of ``folder`` into ``pages``. counts: is added to."""

    def __init__(self, folder: BlockFolder, codec: Codec, pages: Pages, counts: Counts) -> None:
        self.folder, self.codec, self.pages, self.counts = folder, codec, pages, counts
        self._queue: deque[Load] = deque()
        self._loads = 0  # queued, or being read
        self._done: set[str] = set()
        self._bad: set[int] = set()
        self._ends = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvkeep-loads", daemon=True)
        self._thread.start()

    def start(self, load: Load) -> None:
        """Read blocks when those before are read."""
        with self._changed:
            self._queue.append(load)
            self._loads += 1
            self._changed.notify_all()

    def take(self, patience: float = 0.0) -> tuple[set[str], set[int]]:
        """Return the requests whose blocks were read since this was last asked, and which of the cache's blocks are not
        what they should be: the first bad one of a request, and all behind it. patience: seconds to wait for one."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._loads, patience)
            found = self._done, self._bad
            self._done, self._bad = set(), set()
        return found

    def close(self) -> None:
        """End the thread after the block that it reads."""
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
            except Exception:  # the request must not wait for ever
                log.exception("Blocks could not be loaded.")
            with self._changed:
                self.counts.loaded += good
                self.counts.bad += good < len(load.blocks)
                self._bad.update(load.blocks[good:])
                self._done.add(load.request)
                self._loads -= 1
                self._changed.notify_all()

    def _read(self, load: Load) -> int:
        """Return how many blocks are in the cache."""
        for number, (name, block) in enumerate(zip(load.names, load.blocks, strict=True)):
            if self._ends:
                return number
            try:
                self.pages.write(block, self.codec.decode(self.folder.read(name)))
            except StoreError as error:
                log.warning("A block is read anew: %s", error)
                return number
        return len(load.blocks)
