"""One request to the engine, and the events that it reports."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvkeep.engine.answer import Answer, Ask, Piece, Reads
from kvkeep.engine.batch import CHUNK, Read, chunk_of, part_of
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.serve.session import Name, Session

log = logging.getLogger(__name__)


class QueueFull(KvkeepError):
    """The queue is full; retry later."""


class SessionMismatch(UsageError):
    """A request names another method or budget than its session has."""


class PromptTooLong(UsageError):
    """A prompt leaves no position for an answer."""


class EngineStopping(KvkeepError):
    """The engine is shutting down and accepts no requests."""


@dataclass(frozen=True)
class Finished:
    """How an answer ended."""

    reason: str
    """"stop", "length" or "cancelled"."""
    text: str
    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that the cache already held."""
    read: int
    """Tokens of the prompt that were read."""
    written: int
    """Tokens of the answer."""


Event = Piece | Finished | KvkeepError
"""What a listener gets: pieces of text, and at last how the answer ended, or its error."""


@dataclass(frozen=True)
class PendingPrefix:
    """The first ``tokens`` tokens of the prompt of ``job``, which is reading them."""

    job: Job
    tokens: int

    @property
    def done(self) -> bool:
        """Whether they are read; False also where they never will be."""
        session = self.job.session
        return session is not None and session.cache.get_seq_length() >= self.tokens


@dataclass(eq=False)
class Job:
    """One answer, from request to end. listener: is called by the engine's thread with each event, and must not
    wait."""

    ask: Ask
    listener: Callable[[Event], None]
    name: Name | None
    cache: Mapping[str, Any]  # options of KeepCache for a new session
    names_cache: bool = False  # whether the request named method or budget
    owner: str = ""
    session: Session | None = None
    granted: int = 0
    answer: Answer | None = None
    file: Future[Any] | None = None  # its session's, as long as it is read or written
    waits_for: PendingPrefix | None = None  # the job that is reading the beginning of its prompt
    last: Event | None = None  # reported when the session is saved
    at: float = field(default_factory=time.monotonic)  # when it was asked for, and from its first token on the last's
    _reads: Reads | None = None
    _wanted: Read | None = None
    _left: deque[int] = field(default_factory=deque)  # sizes of the chunks of what is wanted that are to come
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _listener_failed: bool = False

    def cancel(self) -> None:
        """Let it end at the next token or chunk; from any thread."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    @property
    def file_busy(self) -> bool:
        """Whether its session is being read or written."""
        return self.file is not None and not self.file.done()

    @property
    def writes(self) -> bool:
        """Whether its prompt is read."""
        return self.answer is not None and bool(self.answer.tokens)

    @property
    def known(self) -> list[int]:
        """The ids that its session's cache has read."""
        assert self.session is not None
        if self.answer is None:
            return [*self.session.past.ids]
        return [*self.ask.prompt, *self.answer.tokens][: self.session.cache.get_seq_length()]

    def want(self, read: Read) -> None:
        """Note what it wants to read next, in chunks as they are cut for it alone: the first takes the remainder."""
        chunk, count = chunk_of(read.cache), len(read.ids)
        whole, rest = divmod(count, chunk)
        self._wanted, self._left = read, deque(([rest] if rest else []) + [chunk] * whole)

    def shorten(self) -> None:
        """Let the next chunk be a short one where it may: others write, and wait for it."""
        assert self._wanted is not None
        left, part = self._left, part_of(self._wanted.cache)
        if left[0] > part:
            left[0] -= part
            left.appendleft(part)

    @property
    def ends_turn(self) -> bool:
        """Whether with the next chunk as many tokens of a prompt were read as one may before it is another's turn."""
        left = sum(self._left)
        return -(-(left - self._left[0]) // CHUNK) < -(-left // CHUNK)

    def part(self) -> Read:
        """Return the next chunk of what it wants to read."""
        read, left = self._wanted, self._left
        assert read is not None
        if len(left) == 1 and left[0] == len(read.ids):
            return read
        start = len(read.ids) - sum(left)
        last = len(left) == 1
        return Read(read.cache, read.ids[start : start + left[0]], read.keep if last else 0, not last)

    def give(self, result: Tensor) -> bool:
        """Take the logits of a chunk, and note what is wanted next; return whether the answer is whole."""
        assert self._reads is not None
        self._left.popleft()
        if self._left:
            return False
        try:
            self.want(self._reads.send(result))
        except StopIteration:
            return True
        return False

    def start(self, answer: Answer) -> None:
        """Begin to write an answer."""
        self.answer, self._reads = answer, answer.reads()
        self.want(next(self._reads))

    def halt(self) -> Answer:
        """Undo what is unfinished of a step, and return the answer as it is."""
        assert self.session is not None and self.answer is not None and self._reads is not None
        past, answer = self.session.past, self.answer
        try:
            with suppress(KvkeepError):  # what cannot be undone is reset, below
                self._reads.close()
            past.recover(answer.known)
        except Exception as error:  # the session reads its text again
            log.warning("A step could not be undone (%s); its session is empty.", type(error).__name__)
            past.cache.reset()
        past.settle([*self.ask.prompt, *answer.tokens])
        return answer

    def tell(self, event: Event) -> None:
        """Call the listener; after it has raised it is not called again, and the answer is cancelled."""
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
        self.session = self.answer = self.file = self.waits_for = self._reads = self._wanted = None
        self.tell(last)
