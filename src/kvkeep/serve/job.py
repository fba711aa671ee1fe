"""One request to the engine, and the events that it reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvkeep.blocks.folder import BlockName
from kvkeep.engine.answer import Answer, Ask, ScheduledAnswer, Scheduler
from kvkeep.engine.pieces import TextPiece
from kvkeep.errors import KvkeepError, OutOfMemory, place_of, ran_out_of_memory
from kvkeep.serve.session import Name, OpenSession
from kvkeep.serve.session_storage import OpenedSession

log = logging.getLogger(__name__)


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
    granted: int = 0
    """Bytes of memory that it may use."""
    scheduled: ScheduledAnswer | None = None
    """The answer in the scheduler."""
    at: float = field(default_factory=time.monotonic)
    """The time of the last token, or of the request before the first."""
    cancelled: bool = False
    _listener_failed: bool = False

    def cancel(self) -> None:
        """End the answer at the next token or chunk. Any thread may call this."""
        self.cancelled = True

    @property
    def answer(self) -> Answer | None:
        """The answer; None until the scheduler has it."""
        return None if self.scheduled is None else self.scheduled.answer

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
            log.warning("A step could not be undone (%s); its session is empty.", type(error).__name__)
            past.cache.reset()
        past.settle([*self.ask.prompt, *answer.tokens])
        return answer

    def finished(self, answer: Answer, reason: str) -> Event:
        """Return the last event of an answer; an error if there is no memory for it."""
        cache, tokens = answer.cache, tuple(answer.tokens)
        counts = answer.known, len(self.ask.prompt) - answer.known, len(tokens), cache.exact_part, cache.lost_tokens
        try:
            return Finished(reason, answer.text, tokens, *counts)
        except MemoryError as error:
            return self.failure(error)

    def failure(self, error: Exception) -> KvkeepError:
        """Return the error that the client gets for ``error``. Of an unexpected one it has the type only, never the
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
            log.warning("A listener failed (%s); its answer is cancelled.", type(error).__name__)

    def end(self, last: Event) -> None:
        """Report the last event, and release session and cache."""
        self.session = self.scheduled = self.opening = self.waits_for = None
        self.tell(last)
