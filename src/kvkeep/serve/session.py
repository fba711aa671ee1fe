"""A session of the server: a cache, the tokens that it has read, and where its turns are stored."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from kvkeep.blocks.beginnings import ENDS
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.errors import UsageError
from kvkeep.policies.request import Request
from kvkeep.serve.arbiter import peak_bytes, restore_bytes, shared_parts

Name = tuple[str, str]
"""Owner and name of a session."""


def check_name(name: Name) -> None:
    """Raise UsageError unless ``name`` is a valid session name."""
    try:
        Store("").path("/".join(name))
    except UsageError as error:
        sentence = str(error).replace("/".join(name), name[1]).partition("; as NAME")[0]
        raise UsageError(f"{sentence}.") from error


@dataclass(eq=False)
class OpenSession:
    """A session in memory."""

    name: Name | None
    """Owner and name; None if the client gave no name."""
    past: CachedText
    """The cache, and the tokens that it has read."""
    owner: str = ""
    stored: StoredSession | None = None
    """The session in the store; None: it is not saved."""
    away: bool = False
    """Whether its turns are only in the store."""
    busy: bool = False
    """Whether an answer is in generation, or the store is being read or written."""
    wanted: bool = False
    """Whether an answer waits until its blocks are stored, which then ends early."""
    note: str | None = None
    """A note to the client."""
    unsaved: str | None = None
    """The reason why its last turn is not saved; the next save tries again."""
    emptied: bool = False
    """Whether its cache was reset after an error. It then keeps its method, although it has read nothing."""
    followed: bool = False
    """Whether another program has continued the session."""
    used: float = field(default_factory=time.time)
    """The time of last use, in seconds since 1970."""
    _counted: tuple[int, Mapping[int, int]] | None = None

    @property
    def cache(self) -> KeepCache:
        """The session's cache."""
        assert isinstance(self.past.cache, KeepCache)
        return self.past.cache

    @property
    def key(self) -> Name:
        """The key in the pool. No client can name the key of an unnamed session."""
        return self.name or ("", f"#{id(self)}")

    def peak_bytes(self, tokens: int, begun: int = 0) -> int:
        """Return the peak bytes of the session until it has read ``tokens`` tokens, including its restore. begun: the
        number of tokens with which it begins from the store."""
        state, entries = 0, begun * self.cache.geometry.full_bytes_per_token
        if self.away and self.stored is not None:
            state, entries = self.stored.bytes
        cache = self.cache
        ends = ENDS * cache.geometry.fixed_bytes(tokens) if cache.stream.moving and self.name is None else 0
        return max(peak_bytes(cache, tokens) + ends, restore_bytes(cache, state, entries))

    @property
    def counted(self) -> tuple[int, Mapping[int, int]]:
        """Bytes of the session, and the shared parts among them by address; counted once while it is idle."""
        if self._counted is None or self.busy:
            self._counted = self.memory_bytes, shared_parts(self.cache)
        return self._counted

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of the session."""
        return self.cache.memory().bytes

    def recount(self) -> None:
        """Discard the count of bytes."""
        self._counted = None

    def touch(self) -> None:
        """Update the time of last use."""
        self.used = time.time()
        self.recount()

    def facts(self) -> dict[str, Any]:
        """Return the facts that the client may see."""
        cache = self.cache
        return {
            "state": "answering" if self.busy else "parked" if self.away else "idle",
            "tokens": len(self.past.ids),
            "saves": 0 if self.stored is None else self.stored.saves,
            "method": cache.method.name,
            "budget": None if cache.request.budget is None else str(cache.request.budget),
            "exact_tokens": cache.exact_tokens,
            "lost_tokens": cache.lost_tokens,
            "memory_bytes": self.memory_bytes,
            "used": self.used,
            "note": self.unsaved or self.note,
        }


@dataclass(frozen=True)
class OpenedSession:
    """A session that is open in the store and whose cache does not exist yet."""

    name: Name
    request: Request
    """The request for its cache."""
    stored: StoredSession | None = None
    """The session in the store, open for writing; None: it is not saved."""
    away: bool = False
    """Whether the store has turns that it continues."""
    note: str | None = None

    def session(self, model: Any) -> OpenSession:
        """Return the session with an empty cache. If KeepCache raises, close it in the store."""
        with ExitStack() as on_error:
            if self.stored is not None:
                on_error.callback(self.stored.close)
            with self.stored.naming() if self.away and self.stored is not None else nullcontext():
                cache = KeepCache(model, request=self.request)
            on_error.pop_all()
        return OpenSession(self.name, CachedText(cache), self.name[0], self.stored, self.away, note=self.note)
