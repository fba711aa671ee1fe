"""One request between two threads: the engine reports events, and the event loop sends them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvkeep.engine.answer import Ask
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.event_buffer import MAX_BUFFERED_BYTES, EventBuffer, StreamEvent
from kvkeep.serve.http.metrics import Metrics
from kvkeep.serve.job import EngineStopping, Event, Finished, Job

FIRST_EVENT_TIMEOUT_S = 3.0
"""Seconds for the first event to decide the status of a response. After them a stream begins without it."""
KEEP_ALIVE_S = 10.0
"""Seconds without an event until a stream gets a comment, so that no proxy closes it."""


@dataclass
class Limits:
    """Limits of one key."""

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

    def acquire(self, owner: str) -> None:
        """Count one more request. Raises APIError if the key has reached its limit."""
        self.check(owner)
        self.running[owner] += 1

    def release(self, owner: str) -> None:
        """Count one request less."""
        self.running[owner] -= 1
        if not self.running[owner]:
            del self.running[owner]


class EngineRequest:
    """A request submitted to the engine for ``owner``. streams: whether its client reads the answer as a stream. Raises
    the errors of :meth:`Engine.submit`."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        limits: Limits,
        owner: str,
        ask: Ask,
        name: tuple[str, str] | None,
        cache: dict[str, Any],
        names_cache: bool,
        streams: bool,
    ) -> None:
        loop, self._events = asyncio.get_running_loop(), EventBuffer()
        self._limits, self._owner, self._streams = limits, owner, streams
        self._timed_out = self._disconnected = False

        def listener(event: Event) -> None:
            found = self._reported(event)
            metrics.finished(found)
            loop.call_soon_threadsafe(self._put, found)

        limits.acquire(owner)
        try:
            self.job: Job = engine.submit(ask, listener, name=name, owner=owner, names_cache=names_cache, **cache)
        except BaseException:
            limits.release(owner)
            raise
        self._timer = None if limits.seconds is None else loop.call_later(limits.seconds, self._time_out)

    def _time_out(self) -> None:
        self._timed_out = True
        self.job.cancel()

    def disconnect(self) -> None:
        """Cancel the request: its client has disconnected, or has everything."""
        self._disconnected = True
        self.job.cancel()

    def _reported(self, event: Event) -> StreamEvent:
        """Return an event as the client receives it. If the time limit or the server's end cut an answer off, it ends
        with "length"; without any token it is an error."""
        if not isinstance(event, Finished) or event.reason != "cancelled" or self._disconnected:
            return event
        if event.written:
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

    async def first(self) -> StreamEvent | None:
        """Wait for the first event, so that an immediate error has a suitable status; None if it takes longer."""
        try:
            return await self._events.get(FIRST_EVENT_TIMEOUT_S)
        except BaseException:
            self.disconnect()
            raise

    async def events(self, event: StreamEvent | None) -> AsyncIterator[StreamEvent | None]:
        """Yield the first event, ``event``, and all others; None after every :data:`KEEP_ALIVE_S` seconds without
        one."""
        while True:
            yield event
            if isinstance(event, Finished | Exception):
                return
            event = await self._events.get(KEEP_ALIVE_S)

    async def all(self) -> list[StreamEvent]:
        """Return all events."""
        found: list[StreamEvent] = []
        while not found or not isinstance(found[-1], Finished | Exception):
            if (event := await self._events.get()) is not None:
                found.append(event)
        return found
