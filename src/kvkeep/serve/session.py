"""A session of the server: a cache, the tokens that it has read, and the file for its turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.decode.session import naming
from kvkeep.decode.session_file import SessionFile
from kvkeep.decode.session_store import SessionStore
from kvkeep.errors import UsageError
from kvkeep.policies.request import Request
from kvkeep.serve.arbiter import current_bytes, peak_bytes, restore_bytes, shared_parts

Name = tuple[str, str]
"""Owner and name of a session."""


def check_name(name: Name) -> None:
    """Raise UsageError unless ``name`` is a valid session name."""
    try:
        SessionStore("").path("/".join(name))
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
    file: SessionFile | None = None
    """The file for its turns; None: they are not saved."""
    away: bool = False
    """Whether its turns are only in the file."""
    busy: bool = False
    """Whether an answer is in generation, or the file is being read or written."""
    turns: int = 0
    note: str | None = None
    """A note to the client."""
    unsaved: str | None = None
    """The reason why its last turn is not in its file; the next save tries again."""
    lost: bool = False
    """Whether another program has continued the session."""
    closing: SessionFile | None = None
    """The file, after its close is queued."""
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
    def exclusive(self) -> bool:
        """Whether no other server can write to the file, now and after the queued work."""
        return self.file is None or not (self.file.closed or self.file is self.closing)

    def align(self, prompt: Sequence[int]) -> None:
        """Crop the cache to its common prefix with ``prompt``; reset a lossy cache that holds more."""
        self.past.align(prompt, crops=self.cache.exactness == "exact")

    def peak_bytes(self, tokens: int) -> int:
        """Return the peak bytes of the session until it has read ``tokens`` tokens, including its restore."""
        restore = restore_bytes(self.file, self.cache) if self.away and self.file is not None else 0
        return max(peak_bytes(self.cache, tokens), restore)

    @property
    def counted(self) -> tuple[int, Mapping[int, int]]:
        """Bytes of the session, and the shared parts among them by address; counted once while it is idle."""
        if self._counted is None or self.busy:
            self._counted = self.memory_bytes, shared_parts(self.cache)
        return self._counted

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of the session."""
        return current_bytes(self.cache)

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
            "turns": self.turns,
            "method": cache.method.name,
            "budget": None if cache.request.budget is None else str(cache.request.budget),
            "memory_bytes": self.memory_bytes,
            "used": self.used,
            "note": self.unsaved or self.note,
        }


@dataclass(frozen=True)
class OpenedFile:
    """A session whose file is open and whose cache does not exist yet."""

    name: Name
    request: Request
    """The request for its cache."""
    file: SessionFile | None = None
    """The file, open for writing; None: no file."""
    away: bool = False
    """Whether the file has turns."""
    note: str | None = None

    def session(self, model: Any) -> OpenSession:
        """Return the session with an empty cache. If KeepCache raises, close the file."""
        with ExitStack() as on_error:
            if self.file is not None:
                on_error.callback(self.file.close)
            with naming(self.file) if self.away and self.file is not None else nullcontext():
                cache = KeepCache(model, request=self.request)
            on_error.pop_all()
        turns = 0 if self.file is None else self.file.turns
        return OpenSession(
            self.name, CachedText(cache), self.name[0], self.file, self.away, turns=turns, note=self.note
        )
