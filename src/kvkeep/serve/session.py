"""A session of the server (a cache, the tokens that it has read, and where its turns are stored), and a job: one answer
in it, from request to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvkeep.blocks.beginnings import ENDS
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.blocks.value import seconds_left
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.engine.answer import Answer, Ask, ScheduledAnswer, Scheduler, chunk_size
from kvkeep.engine.pieces import TextPiece
from kvkeep.errors import KvkeepError, OutOfMemory, UsageError, place_of, ran_out_of_memory
from kvkeep.plan.sizes import grant
from kvkeep.policies.methods import Request
from kvkeep.stores.dynamic import DynamicLayer

log = logging.getLogger(__name__)

Name = tuple[str, str]
"""Owner and name of a session."""
KINDS = ("resident", "compressed", "bookkeeping", "checkpoint_device", "checkpoint_host", "checkpoint_disk")
"""The kinds of bytes of a cache. Bytes on disk are not memory."""


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
    worth: float = 0.0
    """When the value of its text falls to one token (:mod:`kvkeep.blocks.value`), in seconds since 1970."""
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
        return is_under_way(self.work)

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
        on_disk = cache.spec is not None and cache.spec.where == "disk"
        layers = max(1, len(cache.geometry.full_layers))
        restored = state + (0 if on_disk else entries) + -(-(state + entries) // layers)  # those of one layer twice
        return max(peak_bytes(cache, tokens) + ends, restored)

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

    def count_use(self) -> None:
        """Count an answer that was given with its text."""
        now = time.time()
        self.worth = now + seconds_left(max(1, len(self.past.ids)), self.worth - now)

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


@dataclass(frozen=True)
class OpenedSession:
    """A session that is open in the store and whose cache does not exist yet."""

    name: Name
    request: Request
    """The request for its cache."""
    stored: StoredSession | None = None
    """The session in the store, open for writing; None: it is not saved."""
    continues: bool = False
    """Whether the store has turns that it continues."""
    note: str | None = None

    def session(self, model: Any) -> OpenSession:
        """Return the session with an empty cache. If KeepCache raises, close it in the store."""
        with ExitStack() as on_error:
            if self.stored is not None:
                on_error.callback(self.stored.close)
            with self.stored.naming() if self.continues and self.stored is not None else nullcontext():
                cache = KeepCache(model, request=self.request)
            on_error.pop_all()
        state = State.PARKED if self.continues else State.IDLE
        return OpenSession(self.name, CachedText(cache), self.name[0], self.stored, state, note=self.note)


# -- bytes ------------------------------------------------------------------------------------------------


def peak_bytes(cache: KeepCache, tokens: int) -> int:
    """Return :func:`~kvkeep.plan.sizes.grant` of ``cache`` until it has read ``tokens`` tokens, bytes."""
    return grant(
        cache.geometry,
        cache.method,
        cache.entries,
        tokens,
        cache.spec,
        chunk=chunk_size(cache),
        rows=1 if cache.draft_passes is None else min(cache.draft_passes.tail, cache.stream.chunk),
        model=cache.model,
    )


def shared_parts(cache: KeepCache) -> dict[int, int]:
    """Return the bytes of each part that other caches may share, by address."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    parts = [tensor.untyped_storage() for layer in layers for tensor in layer.shared]
    return {part.data_ptr(): part.nbytes() for part in parts}


SessionBytes = tuple[int, Mapping[int, int]]
"""The bytes of a session, and the shared parts among them by address."""


def total_bytes(sessions: Iterable[SessionBytes]) -> int:
    """Return the bytes of some sessions. A part that several of them share counts once."""
    used, parts = 0, dict[int, int]()
    for total, shared in sessions:
        used += total - sum(shared.values())
        parts |= shared
    return used + sum(parts.values())


def bytes_by_kind(cache: KeepCache) -> dict[str, int]:
    """Return the bytes of a cache by kind."""
    found = cache.memory()
    places = (found.checkpoint_bytes[place] for place in ("device", "host", "disk"))
    counts = (found.resident_bytes, found.compressed_bytes, found.bookkeeping_bytes, *places)
    return dict(zip(KINDS, counts, strict=True))


# -- jobs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """The end of an answer."""

    reason: str
    """"stop", "length" or "cancelled"."""
    text: str
    tokens: tuple[int, ...]
    cached: int
    """Prompt tokens that the cache already held."""
    read: int
    """Prompt tokens that were read."""
    written: int
    """Tokens of the answer."""
    exact_tokens: int | None = None
    """The number of first tokens up to which the text is exact, if it is longer than that."""
    lost_tokens: int = 0
    """The number of tokens whose entries the checkpoint has dropped, because it reached its capacity."""
    stop: str | None = None
    """The stop string that ended it."""
    diverged: int | None = None
    """The number of first tokens that the prompt shares with the most similar text in memory, if that goes on
    otherwise."""
    reasoning: int = 0
    """Tokens of its reasoning, once that is known."""


Event = TextPiece | Finished | KvkeepError
"""What a listener receives: pieces of text, then :class:`Finished` or an error."""


@dataclass(frozen=True)
class PendingPrefix:
    """The first ``tokens`` tokens of a prompt that ``job`` is reading."""

    job: Job
    tokens: int

    @property
    def done(self) -> bool:
        """Whether the job has read them; False after the job has ended."""
        session = self.job.session
        return session is not None and session.cache.get_seq_length() >= self.tokens


def is_under_way(work: Future[Any] | None) -> bool:
    """Return whether there is work that is not done."""
    return work is not None and not work.done()


@dataclass(eq=False)
class Job:
    """One answer, from request to end."""

    ask: Ask
    listener: Callable[[Event], None]
    """Called with each event, in the engine's thread; it must not block."""
    name: Name | None
    """Owner and name of the session that it continues; None: a new session without a name."""
    owner: str
    cache: Mapping[str, Any]
    """KeepCache options of a new session."""
    names_cache: bool
    """Whether a session that exists has to have these options."""
    opening: Future[OpenedSession] | None = None
    """The session that is being opened in the store."""
    session: OpenSession | None = None
    """The session, once it is open."""
    found: Future[list[BlockName]] | None = None
    """Stored blocks with which the prompt begins."""
    waits_for: PendingPrefix | None = None
    """The job that reads a prefix of this prompt."""
    diverged: int | None = None
    """The number of first tokens that its prompt shares with the text that it continues, if that goes on otherwise."""
    granted: int = 0
    """Bytes of memory that it may use."""
    scheduled: ScheduledAnswer | None = None
    """The answer in the scheduler."""
    read: int = 0
    """The number of first tokens of the prompt that its cache holds. Any thread may read this."""
    cancelled: bool = False
    _listener_failed: bool = False

    def cancel(self) -> None:
        """End the answer at the next token or chunk. Any thread may call this."""
        self.cancelled = True

    @property
    def answer(self) -> Answer | None:
        """The answer; None until the scheduler has it."""
        scheduled = self.scheduled  # other threads ask, too
        return None if scheduled is None else scheduled.answer

    @property
    def writes(self) -> bool:
        """Whether the prompt has been read and the answer is in generation."""
        return self.scheduled is not None and self.scheduled.writes

    @property
    def known(self) -> list[int]:
        """Ids that the session's cache has read."""
        assert self.session is not None
        if self.answer is None:
            return [*self.session.past.ids]
        return [*self.ask.prompt, *self.answer.tokens][: self.session.cache.get_seq_length()]

    def halt(self, scheduler: Scheduler) -> Answer:
        """Remove the answer from the scheduler, restore the session to the last complete step, and return the answer.
        A lossy session in whose step an error occurred is reset: its text is read again."""
        assert self.session is not None and self.scheduled is not None
        past, answer = self.session.past, self.scheduled.answer
        try:
            with suppress(KvkeepError):  # a session that cannot be restored is reset below
                scheduler.remove(self.scheduled)
            past.recover(answer.known)
            undone = self.session.cache.stream.record.take_undone()
            if undone and not self.session.cache.crops:  # entries may be missing
                past.cache.reset()
                self.session.emptied = True
        except Exception as error:  # the session then reads its text again
            log.warning("A step could not be undone (%s); its session is empty.", place_of(error))
            past.cache.reset()
        past.settle([*self.ask.prompt, *answer.tokens])
        return answer

    def finished(self, answer: Answer, reason: str) -> Event:
        """Return the last event of an answer; an error if there is no memory for it."""
        cache, tokens = answer.cache, tuple(answer.tokens)
        counts = answer.known, len(self.ask.prompt) - answer.known, len(tokens), cache.exact_part, cache.lost_tokens
        try:
            return Finished(reason, answer.text, tokens, *counts, answer.stopped, self.diverged)
        except MemoryError as error:
            return self.failure(error)

    def failure(self, error: Exception) -> KvkeepError:
        """Return the error that the client gets for ``error``. An unexpected error gives only its type, never its
        message, which may quote a prompt or a path; the log has its place."""
        if ran_out_of_memory(error):
            tokens = len(self.ask.prompt)
            doing = "answering" if self.answer is not None and self.answer.tokens else "reading the prompt"
            found: KvkeepError = OutOfMemory(
                f"The server ran out of memory while {doing} ({tokens} tokens of prompt); retry later, or start it "
                "with a smaller --memory."
            )
        elif isinstance(error, KvkeepError):
            return error
        else:
            found = KvkeepError(f"The answer failed with an internal error ({type(error).__name__}).")
        found.__cause__ = error
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment] # no KeyboardInterrupt is a cause
        log.error("An answer failed: %s", place_of(error))
        return found

    def tell(self, event: Event) -> None:
        """Call the listener. If it raises, cancel the answer and stop calling it."""
        if self._listener_failed:
            return
        try:
            self.listener(event)
        except Exception as error:
            self._listener_failed = True
            self.cancel()
            log.warning("A listener failed (%s); its answer is cancelled.", place_of(error))

    def end(self, last: Event) -> None:
        """Report the last event, and release session and cache."""
        self.session = self.scheduled = self.opening = self.waits_for = None
        self.tell(last)
