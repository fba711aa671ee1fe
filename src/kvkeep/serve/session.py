"""A session of the server: a cache, the tokens that it has read, and where its turns are stored."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvkeep.blocks.beginnings import ENDS
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.errors import UsageError
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


class State(Enum):
    """What happens to a session."""

    PARKED = "parked"
    """Nothing; its turns are only in the store."""
    IDLE = "idle"
    """Nothing; its cache is in memory."""
    RESTORING = "restoring"
    """An answer waits until its turns, or the beginning of its prompt, are read from the store."""
    ANSWERING = "answering"
    """An answer is in generation."""
    SAVING = "saving"
    """Its turn, or the blocks of its text, are being stored."""
    YIELDING = "yielding"
    """As :attr:`SAVING`, but that ends early, because an answer waits for its cache."""


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
    state: State = State.IDLE
    work: Future[None] | None = None
    """The work in the store that :attr:`state` names."""
    note: str | None = None
    """A note to the client."""
    unsaved: str | None = None
    """The reason why its last turn is not saved; the next save tries again."""
    emptied: bool = False
    """Whether its cache was reset after an error. It then keeps its method, although it has read nothing."""
    followed: bool = False
    """Whether another program has continued it in the store, where its turns can be saved no more."""
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

    @property
    def busy(self) -> bool:
        """Whether it may not be evicted, nor its cache be taken."""
        return self.state not in (State.IDLE, State.PARKED)

    @property
    def storing(self) -> bool:
        """Whether its turn or its text is being stored."""
        return self.state in (State.SAVING, State.YIELDING)

    @property
    def working(self) -> bool:
        """Whether its work in the store is not done."""
        return self.work is not None and not self.work.done()

    @property
    def has_turns(self) -> bool:
        """Whether the store has turns of it."""
        return self.stored is not None and self.stored.about is not None

    def peak_bytes(self, tokens: int, begun: int = 0) -> int:
        """Return the peak bytes of the session until it has read ``tokens`` tokens, including its restore. begun: the
        number of tokens with which it begins from the store."""
        state, entries = 0, begun * self.cache.geometry.full_bytes_per_token
        if self.state is State.PARKED and self.stored is not None:
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

    def enter(self, state: State) -> None:
        """Go to ``state``, in which its bytes are counted anew."""
        self.state, self._counted = state, None

    def facts(self) -> dict[str, Any]:
        """Return the facts that the client may see."""
        cache = self.cache
        return {
            "state": (State.ANSWERING if self.busy else self.state).value,
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
