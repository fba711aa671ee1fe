"""The memory of requests: bytes of bodies and prompts, from the first one that arrives to the end of the response."""

from __future__ import annotations

import asyncio

from kvkeep.serve.http.errors import CLOSE, APIError

MAX_REQUEST_BYTES = 256_000_000
"""Bytes of all requests together. A larger body than :data:`ALWAYS_BYTES` is refused beyond them."""
ALWAYS_BYTES = 64_000
"""Bytes of one request that are never refused, so that large bodies of some clients do not lock out the others."""
BYTES_PER_TOKEN = 36
"""Bytes of a token id of a prompt: a Python integer and its place in a list."""


class RequestMemory:
    """Counts the bytes of all requests, of which there are at most ``limit``. Only the event loop uses it."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.turns = asyncio.Lock()

    def hold(self) -> Hold:
        """Return the bytes of a new request, which holds none yet."""
        return Hold(self)


class Hold:
    """The bytes of one request."""

    def __init__(self, memory: RequestMemory) -> None:
        self._memory, self.bytes = memory, 0

    def resize(self, count: int) -> None:
        """Hold ``count`` bytes. Raises APIError if all requests together would hold too many."""
        total = self._memory.bytes + count - self.bytes
        if count > max(self.bytes, ALWAYS_BYTES) and total > self._memory.limit:
            sentence = (
                f"The requests under way would take more than {self._memory.limit // 10**6} MB, the most that this "
                "server keeps for them; retry in a moment."
            )
            raise APIError(503, sentence, "overloaded", headers=CLOSE)
        self._memory.bytes, self.bytes = total, count

    async def turn(self) -> None:
        """Wait until this large body may go on. In each pass of the event loop one of them does, so that it is short
        however many arrive at once."""
        async with self._memory.turns:
            await asyncio.sleep(0)

    def tokens(self, count: int) -> None:
        """Hold a prompt of ``count`` tokens, and no body. Raises APIError as :meth:`resize` does."""
        self.resize(count * BYTES_PER_TOKEN)

    def release(self) -> None:
        """Hold nothing."""
        self.resize(0)
