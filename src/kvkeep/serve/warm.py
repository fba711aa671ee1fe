"""Reading a text ahead: its blocks are in the store before a client sends it.

The engine reads it as the prompt of an unnamed session, so that what is stored is what a server begins with. It reads
in parts, each of which is stored before the next: what was read is read once, also if the process is killed.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.store import LOCAL, Store
from kvkeep.cache import KeepCache
from kvkeep.engine.answer import Ask
from kvkeep.errors import UsageError
from kvkeep.memory.rows import BLOCK
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import Event, Finished

PART = 4096
"""Tokens that are read before they are stored."""
POLL_S = 0.1
"""Seconds between two looks at the progress."""


@dataclass(frozen=True)
class StoredText:
    """What the store has of a text."""

    tokens: int
    """The number of its first tokens with which a server begins."""
    blocks: Sequence[BlockName]
    bytes: int
    """Bytes of the blocks."""


def store_of(engine: Engine) -> Store:
    """Return the store of an engine that stores what it reads. Raises UsageError if it stores nothing."""
    storage, cache = engine.sessions.storage, KeepCache(engine.model, **engine.cache)
    if storage.store is None:
        raise UsageError(f"Texts of this model cannot be stored: {storage.refusal}")
    if not beginnings.begins(cache):
        raise UsageError(
            f"The method '{cache.method.name}' is not exact, so no other conversation can begin with what it "
            "read; use full or kv-direct."
        )
    return storage.store


def stored_text(engine: Engine, owner: str, ids: Sequence[int]) -> StoredText:
    """Return what the store has of a text, after reading and comparing it. The engine's thread does not run."""
    folder, prompt = store_of(engine).blocks, [*ids, 0]  # all but the last token of a prompt can be stored
    cache = KeepCache(engine.model, **engine.cache)
    names = beginnings.find(folder, owner or LOCAL, cache, prompt)
    return StoredText(beginnings.begin(folder, cache, names, prompt), names, sum(map(folder.size, names)))


def storable(engine: Engine, tokens: int) -> int:
    """Return how many of a text's ``tokens`` the quota has space for."""
    blocks = -(-tokens // BLOCK)
    fitting = store_of(engine).blocks.fitting(blocks, blocks * BLOCK * engine.geometry.full_bytes_per_token)
    return min(tokens, fitting * BLOCK)


def read_ahead(
    engine: Engine,
    owner: str,
    ids: Sequence[int],
    known: int,
    advance: Callable[[int], None],
    interrupted: Callable[[], bool],
) -> None:
    """Read a text, whose first ``known`` tokens are stored, and store it; end early, after storing what was read, if
    ``interrupted`` returns True. advance: receives the number of tokens read. The engine's thread runs. Raises the
    error of reading it, and UsageError for a text that is too long for the model."""
    positions = engine.positions({})
    if positions is not None and len(ids) >= positions:
        raise UsageError(f"The text has {len(ids):,} tokens, and the model's context {positions:,}; shorten it.")
    for end in (*range(known + PART, len(ids), PART), len(ids)):
        if interrupted():
            return
        events = queue.Queue[Event]()  # one of queue.SimpleQueue may wait for ever after a signal
        job = engine.submit(Ask(ids[:end], 0), events.put, owner=owner)
        last: Event | None = None
        while last is None:
            try:
                last = events.get(timeout=POLL_S)
            except queue.Empty:
                advance(job.read)
                if interrupted():
                    job.cancel()
        if not isinstance(last, Finished):
            assert isinstance(last, Exception)
            raise last
        while engine.call(lambda: bool(engine.sessions.storing)).result():
            time.sleep(POLL_S)
        advance(job.read)
