"""Connections that cost nothing: a client that never ends its header, or never reads, is let go."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 15.0
"""Seconds in which the header of a request has to be there."""
UNREAD_S = 60.0
"""Seconds in which a client has to read some of what waits for it."""
IDLE_S = 30
"""Seconds that a connection is kept open between requests."""


class Connection(H11Protocol):
    """One client's connection, with a time for each thing that it may make the server wait for."""

    def __init__(self, *given: Any, **own: Any) -> None:
        super().__init__(*given, **own)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: Any) -> None:
        """Wait for a header."""
        super().connection_made(transport)
        self._start("header", HEADER_S)

    def data_received(self, data: bytes) -> None:
        """Take what came; as long as it is no whole header, time runs."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._stop("header")
        else:  # a next request, or the rest of a body that nobody reads any more
            self._start("header", HEADER_S)

    def pause_writing(self) -> None:
        """Nobody reads; wait for it."""
        super().pause_writing()
        self._start("unread", UNREAD_S)

    def resume_writing(self) -> None:
        """Some was read."""
        super().resume_writing()
        self._stop("unread")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop("header")
        self._stop("unread")
        super().connection_lost(exc)

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def configured(app: Any, **given: Any) -> uvicorn.Config:
    """Return how uvicorn serves ``app``: with :class:`Connection`, and nothing of requests in its log."""
    own = {"http": Connection, "ws": "none", "access_log": False, "server_header": False, "proxy_headers": False}
    return uvicorn.Config(app, log_level="warning", timeout_keep_alive=IDLE_S, **{**own, **given})
