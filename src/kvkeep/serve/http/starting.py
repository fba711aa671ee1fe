"""The application of a server while its model is being loaded."""

from __future__ import annotations

import asyncio
from typing import Any

from kvkeep.serve.http.errors import APIError

PROBES = ("/health", "/ready")
"""Paths that are answered while the model is being loaded."""
READY_POLL_S = 0.02
"""Seconds between checks whether the model is loaded, for each waiting request."""


class StartingApp:
    """An ASGI application that hands requests to :attr:`app`. Until that is set, at most ``limit`` requests wait; the
    others, and :data:`PROBES`, get a 503."""

    def __init__(self, limit: int) -> None:
        self._limit, self.waiting = limit, 0
        self.app: Any = None
        """The application of the loaded model, or None. Any thread may set it."""
        self.closed = False
        """Whether the start has failed; waiting requests then get a 503. Any thread may set it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if self.app is None and self.waiting < self._limit and scope["path"].rstrip("/") not in PROBES:
            await self._wait()
        if self.app is not None:
            await self.app(scope, receive, send)
        elif self.closed:
            await APIError(503, "The server is shutting down.", "stopping").response()(scope, receive, send)
        else:
            await APIError(503, "The model is being loaded; retry later.", "loading").response()(scope, receive, send)

    async def _wait(self) -> None:
        """Wait until the model is loaded, or the start has failed."""
        self.waiting += 1
        try:
            while self.app is None and not self.closed:
                await asyncio.sleep(READY_POLL_S)
        finally:
            self.waiting -= 1
