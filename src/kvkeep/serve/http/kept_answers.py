"""Answers that do not end with their connection: the server completes them, and clients follow their streams from the
beginning."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from kvkeep.errors import place_of
from kvkeep.serve.http.errors import APIError

Key = tuple[str, str, str]
"""Owner, session and name of an answer."""
MAX_ANSWER_BYTES, MAX_KEPT_BYTES = 8_000_000, 64_000_000
"""Bytes of the stream of one answer (30,000 tokens have about as many), and of all that have ended."""

log = logging.getLogger(__name__)


class KeptAnswer:
    """The stream of one answer. Only the event loop uses it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.done = False
        """Whether nothing more arrives."""
        self._events = list[str]()
        self._comment, self._comments = "", 0  # the last one, if nothing came after it, and how many there were
        self._changed = asyncio.Event()
        self._stop: Callable[[], None] | None = None  # None: it has not begun
        self._stopped = False
        self._task: asyncio.Task[None] | None = None  # the loop itself keeps no task alive

    def fill(self, stream: AsyncIterator[str], stop: Callable[[], None], ended: Callable[[], None]) -> None:
        """Take the answer's events from ``stream`` in a task. stop: ends the answer. ended: called at its end."""
        self._stop = stop
        if self._stopped:
            stop()
        self._task = asyncio.create_task(self._filled(stream, ended))

    async def _filled(self, stream: AsyncIterator[str], ended: Callable[[], None]) -> None:
        try:
            async for event in stream:
                self._add(event)
                if self.bytes > MAX_ANSWER_BYTES:
                    self.stop()
        except Exception as error:
            log.error("A stream failed: %s", place_of(error))
        finally:
            self.end()
            ended()

    def _add(self, event: str) -> None:
        self._comment = event if event.startswith(":") else ""
        if self._comment:
            self._comments += 1
        else:
            self._events.append(event)
            self.bytes += len(event.encode())
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """End the answer at the next token, or before its first one; what it has stays."""
        self._stopped = True
        if self._stop is not None and not self.done:
            self._stop()

    def end(self) -> None:
        """Let followers end: nothing more arrives."""
        self.done = True
        self._notify()

    async def follow(self) -> AsyncIterator[str]:
        """Yield the stream from its beginning to its end. A comment counts only while it is the last one."""
        sent = comments = 0
        while True:
            if sent < len(self._events):
                text, sent = "".join(self._events[sent:]), len(self._events)
                yield text
            elif self.done:
                return
            elif self._comment and comments < self._comments:
                comments = self._comments
                yield self._comment
            else:
                await self._changed.wait()


class KeptAnswers:
    """The answers that clients have named, the newest last."""

    def __init__(self) -> None:
        self._answers = OrderedDict[Key, KeptAnswer]()

    def begin(self, key: Key) -> KeptAnswer:
        """Return a new answer, which replaces one of this name that has ended. Raises APIError if that is running."""
        known = self._answers.get(key)
        if known is not None and not known.done:
            sentence = f"The session's answer '{key[2]}' is running; follow it, stop it, or give this one another name."
            raise APIError(409, sentence, "answer_exists", "kvkeep.answer")
        made = self._answers[key] = KeptAnswer()
        self._answers.move_to_end(key)
        return made

    def get(self, key: Key) -> KeptAnswer:
        """Return an answer. Raises APIError if there is none of this name."""
        if key not in self._answers:
            raise APIError(404, f"The session '{key[1]}' has no answer '{key[2]}' here.", "answer_not_found", "answer")
        return self._answers[key]

    def remove(self, key: Key, answer: KeptAnswer) -> None:
        """Remove an answer that was refused: it has no events to send."""
        answer.end()
        if self._answers.get(key) is answer:  # else its session was deleted meanwhile
            del self._answers[key]

    def forget(self, owner: str, session: str) -> None:
        """Stop and remove all answers of a session."""
        for key in [key for key in self._answers if key[:2] == (owner, session)]:
            self._answers[key].stop()
            del self._answers[key]

    def trim(self) -> None:
        """Remove the oldest answers that have ended, as far as all of them have more than :data:`MAX_KEPT_BYTES`."""
        ended = [(key, answer) for key, answer in self._answers.items() if answer.done]
        total = sum(answer.bytes for _, answer in ended)
        for key, answer in ended:
            if total <= MAX_KEPT_BYTES:
                return
            total -= answer.bytes
            del self._answers[key]
