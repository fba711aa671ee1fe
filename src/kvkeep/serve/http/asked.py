"""One answer between two threads: the engine's tells, and the loop's sends; and how much a key may ask for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvkeep.serve.answer import Ask, Piece
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.errors import Refused
from kvkeep.serve.http.metrics import Metrics
from kvkeep.serve.job import Ended, Event, Job, Stopping

UNREAD = 64
"""Pieces that wait for a slow reader before they are joined."""
FIRST_S = 3.0
"""Seconds in which an answer's first event decides about the status; after them a stream begins without it."""
BEAT_S = 10.0
"""Seconds without a piece after which a stream is given a comment, so that nobody in between takes it for dead."""

News = Piece | Ended | Exception
"""What the loop is told of an answer."""


@dataclass
class Limits:
    """What one key may ask. answers: at once, waiting ones included. seconds: of one answer, from its request on. None:
    no limit."""

    answers: int | None = None
    seconds: float | None = None
    running: Counter[str] = field(default_factory=Counter)

    def take(self, owner: str) -> None:
        """Take a place. Raises Refused where there is none left."""
        if self.answers is not None and self.running[owner] >= self.answers:
            raise Refused(429, f"{self.answers} answers of this key are under way; wait for one.", "too_many_answers")
        self.running[owner] += 1

    def leave(self, owner: str) -> None:
        """Give a place back."""
        self.running[owner] -= 1
        if not self.running[owner]:
            del self.running[owner]


class Mailbox:
    """Events that nobody has read yet. Pieces join where they are read more slowly than they come, so nothing is lost
    and nobody waits; what is held is the text at most."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._last: Ended | Exception | None = None
        self._some = asyncio.Event()

    def put(self, event: News) -> None:
        """Take an event."""
        if isinstance(event, Piece):
            self._pieces.append(event)
            if len(self._pieces) > UNREAD:
                self._pieces = [_joined(self._pieces)]
        else:
            self._last = event
        self._some.set()

    async def get(self, seconds: float | None = None) -> News | None:
        """Return all pieces as one, or the last event; None after so many seconds without any."""
        try:
            async with asyncio.timeout(seconds):
                await self._some.wait()
        except TimeoutError:
            return None
        if self._pieces:
            piece, self._pieces = _joined(self._pieces), []
            if self._last is None:
                self._some.clear()
            return piece
        return self._last


def _joined(pieces: list[Piece]) -> Piece:
    return Piece("".join(one.text for one in pieces), tuple(told for one in pieces for told in one.told))


class Asked:
    """An answer that ``owner`` has asked for. Raises what the engine refuses at once."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        limits: Limits,
        owner: str,
        ask: Ask,
        name: tuple[str, str] | None,
        cache: dict[str, Any],
    ) -> None:
        loop, self._mail = asyncio.get_running_loop(), Mailbox()
        self._limits, self._owner = limits, owner
        self._late = self._left = False  # its time was over; its client has left

        def tell(event: Event) -> None:
            found = self._told(event)
            metrics.told(found)
            if isinstance(event, Ended):
                metrics.asked(event.cached, event.read)
            loop.call_soon_threadsafe(self._take, found)

        limits.take(owner)
        try:
            self.job: Job = engine.submit(ask, tell, name=name, owner=owner, **cache)
        except BaseException:
            limits.leave(owner)
            raise
        self._timer = None if limits.seconds is None else loop.call_later(limits.seconds, self._end)

    def _end(self) -> None:
        self._late = True
        self.job.cancel()

    def leave(self) -> None:
        """Cancel it: nobody waits for it any more."""
        self._left = True
        self.job.cancel()

    def _told(self, event: Event) -> News:
        """Return what is told of an event: an answer that is cut off, by its time or by the server's end, ends by its
        length, or is an error where nothing of it was written."""
        if not isinstance(event, Ended) or event.reason != "cancelled" or self._left:
            return event
        if event.written:
            return replace(event, reason="length")
        if self._late:
            return Refused(503, f"No token was written within {self._limits.seconds:g} s; ask again later.", "timeout")
        return Stopping("The server ended before the answer began; ask again when it is back.")

    def _take(self, event: News) -> None:
        """Take an event, in the loop's thread."""
        self._mail.put(event)
        if not isinstance(event, Piece):
            self._limits.leave(self._owner)
            if self._timer is not None:
                self._timer.cancel()

    async def first(self) -> News | None:
        """Wait for the first event, so that what fails at once has a status of its own; None: it takes longer."""
        try:
            return await self._mail.get(FIRST_S)
        except BaseException:
            self.leave()
            raise

    async def events(self, event: News | None) -> AsyncIterator[News | None]:
        """Yield ``event``, the first, and all others; None for every while without one."""
        while True:
            yield event
            if isinstance(event, Ended | Exception):
                return
            event = await self._mail.get(BEAT_S)

    async def all(self) -> list[News]:
        """Return all events."""
        found: list[News] = []
        while not found or isinstance(found[-1], Piece):
            if (event := await self._mail.get()) is not None:
                found.append(event)
        return found
