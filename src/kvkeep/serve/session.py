"""One session of the server: a cache, the tokens that it has read, and the file that its turns are saved in."""

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
    """Raise UsageError unless a session can have this name."""
    try:
        SessionStore("").path("/".join(name))
    except UsageError as error:
        sentence = str(error).replace("/".join(name), name[1]).partition("; as NAME")[0]
        raise UsageError(f"{sentence}.") from error


@dataclass(eq=False)
class OpenSession:
    """A session in memory."""

    name: Name | None
    """None: its client did not name it."""
    past: CachedText
    """Its cache, and the tokens that the cache has read."""
    owner: str = ""
    file: SessionFile | None = None
    """Where its turns are saved; None: nowhere."""
    away: bool = False
    """Whether its turns are still in the file only."""
    busy: bool = False
    """Whether an answer is being generated, or its file read or written."""
    turns: int = 0
    note: str | None = None
    """What its client should know."""
    unsaved: str | None = None
    """Why its last turn is not in its file; the next save tries again."""
    lost: bool = False
    """Whether another program has continued it."""
    closing: SessionFile | None = None
    """Its file, from when its close is queued."""
    used: float = field(default_factory=time.time)
    """When it was last used, in seconds since the epoch."""
    _counted: tuple[int, Mapping[int, int]] | None = None

    @property
    def cache(self) -> KeepCache:
        """Its cache."""
        assert isinstance(self.past.cache, KeepCache)
        return self.past.cache

    @property
    def key(self) -> Name:
        """Its key in the pool; no client can name one that has no name."""
        return self.name or ("", f"#{id(self)}")

    @property
    def exclusive(self) -> bool:
        """Whether no other server can write to its file, now and after what is queued."""
        return self.file is None or not (self.file.closed or self.file is self.closing)

    def align(self, prompt: Sequence[int]) -> None:
        """Cut its cache to what ``prompt`` begins with; a lossy cache that holds more is emptied."""
        self.past.align(prompt, crops=self.cache.exactness == "exact")

    def peak_bytes(self, tokens: int) -> int:
        """Return the bytes that it can need until it has read ``tokens`` tokens, restoring it included."""
        restore = restore_bytes(self.file, self.cache) if self.away and self.file is not None else 0
        return max(peak_bytes(self.cache, tokens), restore)

    @property
    def counted(self) -> tuple[int, Mapping[int, int]]:
        """Its bytes, and of these the parts that other sessions may share, by address; counted once while it is
        idle."""
        if self._counted is None or self.busy:
            self._counted = self.memory_bytes, shared_parts(self.cache)
        return self._counted

    @property
    def memory_bytes(self) -> int:
        """Its bytes of memory."""
        return current_bytes(self.cache)

    def recount(self) -> None:
        """Count its bytes anew when they are next asked for."""
        self._counted = None

    def touch(self) -> None:
        """Note that it is used now."""
        self.used = time.time()
        self.recount()

    def facts(self) -> dict[str, Any]:
        """Return what its client may know of it."""
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
    """A session whose file was opened, and whose cache is not made yet."""

    name: Name
    request: Request
    """What its cache is."""
    file: SessionFile | None = None
    """Open for writing; None: it has none."""
    away: bool = False
    """Whether there are turns in the file."""
    note: str | None = None

    def session(self, model: Any) -> OpenSession:
        """Return the session with an empty cache. Raises the errors of KeepCache, and then closes the file."""
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
