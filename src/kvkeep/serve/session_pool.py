"""The sessions in memory, and the order of their eviction.

Eviction closes a session's file and releases its cache. The next request restores the same entries
(:mod:`~kvkeep.serve.session_files`). Only the engine's thread uses the pool. Caches are created in that thread, because
a method may run the model for it (``h2o-fisher`` and ``duo-attention`` measure the model once).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from kvkeep.errors import SessionBusy
from kvkeep.native.library import trim_memory
from kvkeep.serve.session import Name, OpenedFile, OpenSession
from kvkeep.serve.session_files import SessionFiles

log = logging.getLogger(__name__)

TRIM_BYTES = 2**25
"""Released bytes after which memory is returned to the system. This takes 12 ms of every second of reading a prompt."""
QUOTA_INTERVAL_S = 60.0
"""Seconds between two checks of quota and age."""


class SessionPool:
    """Sessions by key, the least recently used first."""

    def __init__(self, model: Any, files: SessionFiles) -> None:
        self.model, self.files = model, files
        self.memory: OrderedDict[Name, OpenSession] = OrderedDict()
        self.parked = 0
        """The number of evicted sessions."""
        self.released_bytes = 0
        """Bytes released since memory was last returned to the system."""
        self._quota_checked = 0.0
        self._over_quota: Future[list[str]] | None = None  # a check under way

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of sessions parked, restored and saved so far."""
        return {"parked": self.parked, "restored": self.files.restored, "saved": self.files.saved}

    def idle(self) -> list[OpenSession]:
        """Return the sessions that can be evicted, in order: unnamed ones first, because clients cannot request them
        again; then the least recently used; last those with an unsaved turn."""
        idle = [one for one in self.memory.values() if not one.busy]
        return sorted(idle, key=lambda one: (one.unsaved is not None, one.name is not None))

    def adopt(self, opened: OpenedFile) -> OpenSession:
        """Return the session of an opened file: the session in memory if the file has not changed, otherwise one with
        an empty cache, whose turns must be restored. Raises SessionError and the errors of KeepCache."""

        def session() -> OpenSession:
            return self._still_in_memory(opened) or opened.session(self.model)

        found = self.memory[opened.name] = self.files.naming_session(opened.name, session)
        return found

    def _still_in_memory(self, opened: OpenedFile) -> OpenSession | None:
        session = self.memory.get(opened.name)
        if session is None:
            return None
        if session.file is not None and opened.file is not None and opened.file.follows(session.file):
            session.file = opened.file
            return session
        self.park(session)
        return None

    def touch(self, session: OpenSession) -> None:
        """Mark a session as answering."""
        session.busy = True
        self.memory[session.key] = session
        self.use(session)

    def use(self, session: OpenSession) -> None:
        """Mark a session as the most recently used."""
        session.touch()
        if session.key in self.memory:
            self.memory.move_to_end(session.key)

    def leave(self, session: OpenSession, stay: bool = True) -> None:
        """Mark a session as idle; remove it if it has read nothing."""
        session.busy = False
        session.recount()
        if not (stay and (session.away or session.past.cache.get_seq_length())):
            self.park(session)
        elif self.files.shared and session.file is not None and session.unsaved is None and session.exclusive:
            self.files.close_later(session)

    def park(self, session: OpenSession) -> None:
        """Evict a session; its turns remain in its file, if it has one. If the last save failed, save again and wait
        for it."""
        if session.unsaved is not None and not session.lost:
            self.files.write(session)
            if session.unsaved is not None:
                log.warning("A session is evicted without its last turn.")
                if session.file is not None and session.file.about is not None:  # otherwise the session is forgotten
                    note = f"{session.unsaved} It was lost when the session was evicted from memory."
                    self.files.lost_turns[session.key] = note
        self.memory.pop(session.key, None)
        self.released_bytes += session.counted[0]
        if session.file is not None:
            self.parked += not session.away
            self.files.close(session.file)

    def drop(self, name: Name) -> bool:
        """Remove a session whose file will be removed; return whether it was in memory. Raises SessionBusy."""
        session = self.memory.get(name)
        self.files.lost_turns.pop(name, None)
        if session is None:
            return False
        if session.busy:
            raise SessionBusy(f"The session '{name[1]}' is answering.")
        session.unsaved = None  # its last turn is discarded, too
        self.park(session)
        return True

    def facts(self, owner: str, name: str | None = None, marks: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the facts that clients may see about the owner's sessions in memory, or one of them, by name, and the
        notes on evicted ones.

        marks: the last writers of the sessions' files, if other servers also write to the folder. Then a session in
        memory counts only if this server was the last writer, and is evicted if its file no longer exists.
        """
        sessions = {key[1]: one for key, one in self.memory.items() if key[0] == owner and name in (None, key[1])}
        if marks is not None:
            for key, one in [*sessions.items()]:
                if not one.busy and one.unsaved is None and one.file is not None and one.file.mark != marks.get(key):
                    del sessions[key]
                    if key not in marks:
                        self.park(one)
        lost = {key[1]: {"note": note} for key, note in [*self.files.lost_turns.items()] if key[0] == owner}
        return lost | {key: one.facts() for key, one in sessions.items()}

    def enforce_quota(self) -> None:
        """Enforce quota and age once in :data:`QUOTA_INTERVAL_S`: evict idle sessions over the limits, and remove their
        files. Sessions without a file are not counted."""
        store = self.files.store
        if store is None or (store.quota is None and store.age is None):
            return
        if self._over_quota is None and time.monotonic() - self._quota_checked >= QUOTA_INTERVAL_S:
            self._over_quota = self.files.over_quota()
        if self._over_quota is None or not self._over_quota.done():
            return
        over, self._over_quota, self._quota_checked = self._over_quota.result(), None, time.monotonic()
        for session in self.idle():
            old = store.age is not None and time.time() - session.used > store.age
            if session.file is not None and (old or "/".join(session.key) in over):
                self.park(session)
        self.files.evict()

    def trim_memory(self) -> None:
        """Return released memory to the system from time to time. Parts in use lie between it, so the process would
        otherwise grow (16 prompts of 2,048 tokens in ``full``: 400 to 550 MB more)."""
        if self.released_bytes > TRIM_BYTES:
            self.released_bytes = 0
            trim_memory()

    def close(self) -> None:
        """Finish the queued work, and close all files."""
        self.files.shutdown()
        for session in [*self.memory.values()]:
            self.park(session)
