"""The events of an answer, buffered until its client reads them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from kvkeep.engine.pieces import TextPiece
from kvkeep.errors import EngineStopping
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.protocol import Progress, StreamEvent
from kvkeep.serve.session import Event, Finished, Job

FIRST_EVENT_TIMEOUT_S = 3.0
"""Seconds for the first event to decide the status of a response. After them, or once the prompt is being read for
:data:`PROGRESS_S` seconds, a stream begins without it."""
PROGRESS_S = 1.0
"""Seconds without an event until a stream gets a comment: its client sees the progress, and no proxy closes it."""
MAX_PIECE_TOKENS, MAX_PIECE_CHARACTERS = 16, 4096
"""Tokens with log-probabilities, and characters, of pieces that are joined. Writing one as JSON takes a few
milliseconds, in which the event loop does nothing else."""
MAX_BUFFERED_BYTES = 8_000_000
"""Bytes of unread events. A stream whose client falls further behind ends."""
_TOKEN_BYTES, _TOP_BYTES = 250, 150
"""Bytes of a token's log-probability, and of each of the likeliest tokens with it."""


@dataclass
class Limits:
    """The limits of every key, and the running requests of each."""

    answers: int | None = None
    """Simultaneous requests, including waiting ones; None: no limit."""
    seconds: float | None = None
    """Seconds of one request, including waiting; None: no limit."""
    running: Counter[str] = field(default_factory=Counter)
    """Running requests by owner."""

    def check(self, owner: str) -> None:
        """Raise APIError if the key has reached its limit."""
        if self.answers is not None and self.running[owner] >= self.answers:
            sentence = f"This key already has {self.answers} requests under way; retry when one has finished."
            raise APIError(429, sentence, "too_many_answers")

    def release(self, owner: str) -> None:
        """Count one request less."""
        self.running[owner] -= 1
        if not self.running[owner]:
            del self.running[owner]


class EventBuffer:
    """Unsent events. Small pieces are joined if they arrive faster than they are read. No text is lost, and the engine
    does not wait."""

    def __init__(self) -> None:
        self.bytes = 0
        """About the bytes of the pieces."""
        self._pieces = deque[TextPiece]()
        self._last: StreamEvent | None = None
        self._available = asyncio.Event()

    def put(self, event: StreamEvent) -> None:
        """Add an event. After the end there are no more."""
        if self._last is not None:
            return
        if not isinstance(event, TextPiece):
            self.end(event)
            return
        self.bytes += _bytes(event)
        if self._pieces and _small(self._pieces[-1], event):
            before = self._pieces.pop()
            event = TextPiece(before.text + event.text, before.logprobs + event.logprobs)
        self._pieces.append(event)
        self._available.set()

    def end(self, last: StreamEvent) -> None:
        """Add the last event."""
        self._last = last
        self._available.set()

    async def get(self, timeout: float | None = None) -> StreamEvent | None:
        """Return the next pieces joined, or the last event; None after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._available.wait()
        except TimeoutError:
            return None
        if not self._pieces:
            return self._last
        piece = self._pieces.popleft()
        self.bytes -= _bytes(piece)
        if not self._pieces and self._last is None:
            self._available.clear()
        return piece


def _small(one: TextPiece, other: TextPiece) -> bool:
    """Return whether two pieces are one of a size that is written at once."""
    tokens, characters = len(one.logprobs) + len(other.logprobs), len(one.text) + len(other.text)
    return tokens <= MAX_PIECE_TOKENS and characters <= MAX_PIECE_CHARACTERS


def _bytes(piece: TextPiece) -> int:
    return len(piece.text.encode()) + sum(_TOKEN_BYTES + _TOP_BYTES * len(one.top) for one in piece.logprobs)


class AnswerEvents:
    """The events of a request that is submitted to the engine for ``owner``. submit: submits it with a listener.
    streams: whether its client reads the answer as a stream. count: called with each event, in the engine's thread.
    Raises APIError for a key at its limit, and the errors of ``submit``."""

    def __init__(
        self,
        submit: Callable[[Callable[[Event], None]], Job],
        limits: Limits,
        owner: str,
        streams: bool,
        count: Callable[[StreamEvent], None],
    ) -> None:
        loop, self._events = asyncio.get_running_loop(), EventBuffer()
        self._limits, self._owner, self._streams = limits, owner, streams
        self._timed_out = self._disconnected = self._stopped = False

        def listener(event: Event) -> None:
            found = self._reported(event)
            count(found)
            loop.call_soon_threadsafe(self._put, found)

        limits.check(owner)
        limits.running[owner] += 1
        try:
            self.job = submit(listener)
        except BaseException:
            limits.release(owner)
            raise
        self._timer = None if limits.seconds is None else loop.call_later(limits.seconds, self._time_out)

    def _time_out(self) -> None:
        self._timed_out = True
        self.job.cancel()

    def stop(self) -> None:
        """End the answer, which has what is written."""
        self._stopped = True
        self.job.cancel()

    def disconnect(self) -> None:
        """Cancel the request: its client has disconnected, or has everything."""
        self._disconnected = True
        self.job.cancel()

    def _reported(self, event: Event) -> StreamEvent:
        """Return an event as the client receives it. If the client, the time limit or the server's end cut an answer
        off, it ends with "length"; without any token it is an error, unless the client stopped it."""
        if not isinstance(event, Finished) or event.reason != "cancelled" or self._disconnected:
            return event
        if event.written or self._stopped:
            return replace(event, reason="length")
        if self._timed_out:
            return APIError(503, f"No token was generated within {self._limits.seconds:g} s; retry later.", "timeout")
        return EngineStopping("The server shut down before the answer began; retry when it is back.")

    def _put(self, event: StreamEvent) -> None:
        """Buffer an event, in the event loop's thread. If the client falls too far behind, its answer ends."""
        self._events.put(event)
        if self._events.bytes > MAX_BUFFERED_BYTES and self._streams:
            sentence = (
                f"The client reads too slowly: more than {MAX_BUFFERED_BYTES // 10**6} MB of the answer wait for it; "
                "read faster, or ask for fewer top_logprobs."
            )
            self._events.end(APIError(408, sentence, "too_slow"))
            self.job.cancel()
        if isinstance(event, Finished | Exception):
            self._limits.release(self._owner)
            if self._timer is not None:
                self._timer.cancel()

    async def first(self) -> StreamEvent | Progress:
        """Wait for the first event, so that an immediate error has a suitable status; return the progress if it takes
        longer. Raises that error."""
        found, left = None, FIRST_EVENT_TIMEOUT_S
        try:
            while found is None and left > 0:
                found = await self._events.get(min(left, PROGRESS_S))
                left = 0 if self.job.answer is not None else left - PROGRESS_S
        except BaseException:
            self.disconnect()
            raise
        if isinstance(found, Exception):
            raise found
        return found or self._progress

    async def events(self, event: StreamEvent | Progress) -> AsyncIterator[StreamEvent | Progress]:
        """Yield the first event, ``event``, and all others; the progress after every :data:`PROGRESS_S` seconds without
        one."""
        while True:
            yield event
            if isinstance(event, Finished | Exception):
                return
            event = await self._events.get(PROGRESS_S) or self._progress

    @property
    def _progress(self) -> Progress:
        return Progress(self.job.read, len(self.job.ask.prompt))

    async def all(self) -> list[StreamEvent]:
        """Return all events."""
        found: list[StreamEvent] = []
        while not found or not isinstance(found[-1], Finished | Exception):
            if (event := await self._events.get()) is not None:
                found.append(event)
        return found
