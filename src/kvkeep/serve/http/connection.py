"""HTTP connections with limits of time, of their number, and of the pieces in which a body arrives."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvkeep.serve.http.errors import CLOSE, APIError

HEADER_TIMEOUT_S = 15.0
"""Seconds for the header of a request to arrive."""
WRITE_TIMEOUT_S = 60.0
"""Seconds for a client to read some of the written data."""
KEEP_ALIVE_S = 30
"""Seconds that an idle connection stays open."""
MAX_HEADER_BYTES = 65_536
"""Bytes of a request's header, and of its URL."""
MAX_CONNECTIONS, MIN_CONNECTIONS = 1000, 8
"""Open connections at the same time, and how many there are at least where the system allows few open files."""
SPARE_FILES = 16
"""Files that connections never take: of the loaded model, and of the store."""
MAX_BACKLOG = 512
"""Connections that the system keeps until they are accepted."""
FREE_CHUNKS, CHUNK_BYTES = 256, 64
"""Chunks of a body of any size, and the average bytes of more than those: parsing one takes some 20 µs."""


class Parser(h11.Connection):
    """A parser that refuses a body of tiny chunks."""

    def __init__(self, limit: int) -> None:
        super().__init__(h11.SERVER, limit)
        self._chunks = self._bytes = 0  # of the body that is being read

    def next_event(self) -> Any:
        """Return the next event. Raises RemoteProtocolError for what is not HTTP, and for too many chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("The chunks of the body are too small.")
        return event


class Connection(H11Protocol):
    """One client's connection, with a timer for each event that the server waits for. limit: connections that are open
    at the same time."""

    def __init__(self, *args: Any, limit: int = MAX_CONNECTIONS, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Parser(MAX_HEADER_BYTES)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._limit = limit
        self._idle_since = time.monotonic()

    @property
    def _idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Wait for a header. Beyond the limit of connections, close the one that has been idle for longest; without an
        idle one, refuse this one."""
        others = [one for one in self.connections if isinstance(one, Connection)]
        super().connection_made(transport)
        if len(others) >= self._limit:
            idle = [one for one in others if one._idle and not one.transport.is_closing()]
            if idle:
                min(idle, key=lambda one: one._idle_since).transport.abort()
            else:
                transport.write(_refusal())
                transport.close()
                return
        self._start("header", HEADER_TIMEOUT_S)

    def on_response_complete(self) -> None:
        """Note the time from which on the connection is idle."""
        self._idle_since = time.monotonic()
        super().on_response_complete()

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

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP. If a response has begun, only close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _should_upgrade(self) -> bool:
        """Treat a WebSocket request as a plain request, without uvicorn's advice to install a library."""
        return False

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def _refusal() -> bytes:
    """Return the response to a connection beyond the limit."""
    error = APIError(503, "The server has too many connections; retry later.", "overloaded", headers=CLOSE)
    response = error.response()
    head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n" + head + b"\r\n" + bytes(response.body)


def connection_limit() -> int:
    """Return the maximum number of open connections: a half of the files that this process may still open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = 0
    with suppress(OSError):
        used = len(os.listdir("/proc/self/fd"))
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, (files - used - SPARE_FILES) // 2))


def uvicorn_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for ``app``, with :class:`Connection` and without uvicorn's access log."""
    limit = connection_limit()
    ours = {
        "http": partial(Connection, limit=limit), "ws": "none", "access_log": False, "server_header": False,
        "proxy_headers": False,
        "backlog": min(limit, MAX_BACKLOG),  # asyncio accepts as many at once
    }  # fmt: skip
    return uvicorn.Config(app, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, **{**ours, **options})
