"""Work for a client ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from kvkeep.serve.http.errors import APIError

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. Raises APIError if the client disconnects first, and the errors of ``work``."""
    disconnected, done = asyncio.ensure_future(_disconnect(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({disconnected, done}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise APIError(499, "The client has disconnected.")
        return done.result()
    finally:
        disconnected.cancel()
        done.cancel()


async def _disconnect(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
