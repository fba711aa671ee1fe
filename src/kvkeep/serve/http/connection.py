"""HTTP connections with time limits. A client that never ends its header, or never reads, is disconnected."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 15.0
"""Seconds for the header of a request to arrive."""
WRITE_TIMEOUT_S = 60.0
"""Seconds for a client to read some of the written data."""
KEEP_ALIVE_S = 30
"""Seconds that an idle connection stays open."""


class Connection(H11Protocol):
    """One client's connection, with a timer for each event that the server waits for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: Any) -> None:
        """Wait for a header."""
        super().connection_made(transport)
        self._start("header", HEADER_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        """Handle the data; the timer runs until the header is complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and self.conn.our_state is not h11.DONE:
            self._stop("header")
        else:  # the next request, or the rest of an abandoned body
            self._start("header", HEADER_TIMEOUT_S)

    def pause_writing(self) -> None:
        """Start the timer: the client does not read."""
        super().pause_writing()
        self._start("write", WRITE_TIMEOUT_S)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        super().resume_writing()
        self._stop("write")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop("header")
        self._stop("write")
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        """Treat a WebSocket request as a plain request, without uvicorn's advice to install a library."""
        return False

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def uvicorn_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for ``app``, with :class:`Connection` and without uvicorn's access log."""
    ours = {"http": Connection, "ws": "none", "access_log": False, "server_header": False, "proxy_headers": False}
    return uvicorn.Config(app, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, **{**ours, **options})
