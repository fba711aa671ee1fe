"""The events of an answer that its client has not read yet."""

from __future__ import annotations

import asyncio
from collections import deque

from kvkeep.engine.answer import TextPiece
from kvkeep.serve.job import Finished

MAX_PIECE_TOKENS, MAX_PIECE_CHARACTERS = 16, 4096
"""Tokens with log-probabilities, and characters, of pieces that are joined. Writing one as JSON takes a few
milliseconds, in which the event loop does nothing else."""
MAX_BUFFERED_BYTES = 8_000_000
"""Bytes of unread events. A stream whose client falls further behind ends."""
_TOKEN_BYTES, _TOP_BYTES = 250, 150
"""Bytes of a token's log-probability, and of each of the likeliest tokens with it."""

StreamEvent = TextPiece | Finished | Exception
"""What the event loop receives from an answer."""


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
    return len(piece.text) + sum(_TOKEN_BYTES + _TOP_BYTES * len(one.top) for one in piece.logprobs)
