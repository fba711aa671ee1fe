"""A server that listens before its model is loaded."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from kvkeep.cli.serve.address import Address
from kvkeep.errors import KvkeepError
from kvkeep.serve.http.body import start_workers
from kvkeep.serve.http.connection import uvicorn_config
from kvkeep.serve.http.starting import StartingApp

POLL_S = 0.01
"""Seconds between checks whether the server listens."""
WAIT_S = 0.5
"""Seconds of one wait for the server's end: on Windows, Ctrl-C does not interrupt a wait."""


class HTTPServer(uvicorn.Server):
    """uvicorn in a thread. It installs no signal handlers."""

    def __init__(self, app: StartingApp, address: Address, grace: float, bound: socket.socket) -> None:
        """bound: the socket of ``address``. grace: seconds for running answers at the end."""
        super().__init__(uvicorn_config(app, lifespan="off", timeout_graceful_shutdown=int(grace) + 1, **address.tls))
        self.url = address.url(bound.getsockname()[1])
        """Its URL on this machine."""
        self._app = app
        self._thread = threading.Thread(target=self.run, kwargs={"sockets": [bound]}, name="kvkeep-http", daemon=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: the command handles signals, so that answers end before connections."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the worker threads, and listen."""
        start_workers()
        await super().startup(sockets)

    def start(self) -> None:
        """Start the thread; return when the server accepts requests. Raises KvkeepError if that fails."""
        self._thread.start()
        while not self.started:
            if not self._thread.is_alive():
                raise KvkeepError("The server cannot listen; the error is logged above.")
            time.sleep(POLL_S)

    def serve_until_exit(self, app: Any) -> None:
        """Hand all requests to ``app``, an ASGI application, until :attr:`should_exit` is set."""
        self._app.app = app
        self.join()

    def join(self) -> None:
        """Wait until the server has ended."""
        while self._thread.is_alive():
            self._thread.join(WAIT_S)


@contextmanager
def listening(address: Address, grace: float, waiting: int) -> Iterator[HTTPServer]:
    """Listen on ``address`` within the block. At most ``waiting`` requests wait until the server gets its application.
    grace: seconds for running answers at the end. Raises UsageError if the address cannot be used."""
    app = StartingApp(waiting)
    _raise_file_limit()
    with address.socket() as bound:
        server = HTTPServer(app, address, grace, bound)
        server.start()
        try:
            yield server
        finally:
            app.closed, server.should_exit = True, True
            server.join()


def _raise_file_limit() -> None:
    """Raise the limit of open files to the maximum: each session in memory and each connection needs a file."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
