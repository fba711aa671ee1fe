"""One process of a server whose store other processes use, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvkeep.blocks.store import Store
from kvkeep.serve.service import Service
from kvkeep.serve.session import Name, OpenedSession, OpenSession
from kvkeep.serve.session_pool import SessionPool
from kvkeep_cluster.bucket import BucketStore


class SharedPool(SessionPool):
    """Sessions in memory that other processes may continue after each turn.

    The lock of a session is released when its answer has ended and its turn is saved. The next answer opens the session
    again, and takes what is in memory if no other process has saved it meanwhile.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._released: set[Name] = set()

    def get(self, name: Name) -> OpenSession | None:
        """Return a session whose lock this process holds."""
        return None if name in self._released else super().get(name)

    def adopt(self, opened: OpenedSession) -> OpenSession:
        """Return the session in memory if it is as it was saved last, otherwise one with an empty cache."""
        self._released.discard(opened.name)
        known = self.memory.get(opened.name)
        if known is None:
            return super().adopt(opened)
        if known.stored is not None and opened.stored is not None and known.stored.mark == opened.stored.mark:
            known.stored = opened.stored
            return known
        self.park(known)
        return super().adopt(opened)

    def leave(self, session: OpenSession, stay: bool = True) -> None:
        """Mark a session as idle, and release its lock unless it has an unsaved turn."""
        super().leave(session, stay)
        if session.key in self.memory and session.stored is not None and session.unsaved is None:
            self.storage.close(session.stored)
            self._released.add(session.key)

    def park(self, session: OpenSession) -> None:
        """Evict a session."""
        super().park(session)
        self._released.discard(session.key)

    def facts(self, owner: str, name: str | None = None) -> dict[str, Any]:
        """Return the facts about the sessions that this process holds; the store has those of the others."""
        return {key: facts for key, facts in super().facts(owner, name).items() if (owner, key) not in self._released}


@dataclass(frozen=True)
class ClusterService(Service):
    """The options of one process; several may share its store."""

    pool = SharedPool
    bucket: str | None = None
    """The bucket of the store (``s3://BUCKET/PREFIX``); None: the store is in the folder only."""

    @property
    def place(self) -> str:
        """Where conversations are stored, for people."""
        return super().place if self.bucket is None else f"{self.bucket}, with copies in {self.sessions}"

    def store(self) -> Store | None:
        """Return the store, if there is one. Raises UsageError if nothing can be stored there."""
        store = super().store()
        if store is None or self.bucket is None:
            return store
        return BucketStore(store.folder, str(self.bucket), quota=self.quota, age=self.age)
