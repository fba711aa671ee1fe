"""A server in this process, which listens before its model is loaded."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn

from kvkeep.cli.output import note
from kvkeep.cli.serve.address import Address
from kvkeep.cli.startup import startup
from kvkeep.errors import KvkeepError
from kvkeep.serve.http.body import start_workers
from kvkeep.serve.http.connection import uvicorn_config
from kvkeep.serve.http.errors import APIError

if TYPE_CHECKING:
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.service import Service

STOPPED = "stopped; all turns are saved"
PROBES = ("/health", "/ready")
"""Paths that are answered while the model is being loaded."""
READY_POLL_S = 0.02
"""Seconds between checks whether the model is loaded, for each waiting request."""
POLL_S = 0.01
"""Seconds between checks whether the server listens."""
WAIT_S = 0.5
"""Seconds of one wait for the server's end: on Windows, Ctrl-C does not interrupt a wait."""


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
            await self._refuse("The server is shutting down.", "stopping", scope, receive, send)
        else:
            await self._refuse("The model is being loaded; retry later.", "loading", scope, receive, send)

    async def _refuse(self, sentence: str, code: str, scope: Any, receive: Any, send: Any) -> None:
        await APIError(503, sentence, code).response(scope["path"])(scope, receive, send)

    async def _wait(self) -> None:
        """Wait until the model is loaded, or the start has failed."""
        self.waiting += 1
        try:
            while self.app is None and not self.closed:
                await asyncio.sleep(READY_POLL_S)
        finally:
            self.waiting -= 1


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


def serve_here(
    server: HTTPServer, service: Service, address: Address, conversations: int, grace: float, saved: str, access: str
) -> None:
    """Load the model and serve until SIGTERM or Ctrl-C; running answers then get ``grace`` seconds to finish. server:
    listens on ``address`` already. conversations: share the memory if the service names no cache. saved, access: lines
    to print about the store and keys. Raises KvkeepError if the engine failed."""
    from kvkeep.cli.serve.defaults import describe_default, with_defaults
    from kvkeep.serve.http.app import log_requests

    with startup(service.model):
        loaded = service.load(note)
    service = with_defaults(service, loaded, conversations)
    engine = service.engine(loaded)
    # It builds a cache, which may measure the model: before the engine uses it.
    default = describe_default(engine, service.pin)
    engine.start()
    app = service.application(engine, loaded)  # the engine warms up meanwhile
    size = f"{engine.arbiter.total / 1e6:.0f} MB for all conversations"
    note(f"{server.url}/v1  model '{loaded.name}', {size}; chat page: {server.url}/")
    if address.is_any:
        note("from another machine, use this machine's name or address instead")
    note(default)
    refusal = engine.sessions.storage.refusal
    note(saved if refusal is None else f"conversations are not stored: {refusal}")
    note(access)
    if service.log_requests:
        log_requests()
    _stop_on_signals(server, engine, grace)
    server.serve_until_exit(app)
    if engine.fault is not None:
        raise KvkeepError("The server stopped because its engine failed; the error is logged above.")
    engine.stop(0.0)
    note("stopped" if engine.sessions.storage.store is None else STOPPED)


def _stop_on_signals(server: HTTPServer, engine: Engine, grace: float) -> None:
    """Handle SIGTERM and Ctrl-C: refuse new requests, let answers finish within ``grace`` seconds, and stop the server.
    Stop it also when the engine ends."""

    def stop_server() -> None:
        engine.join()
        server.should_exit = True

    requested = threading.Event()

    def stop_engine() -> None:
        requested.wait()
        note(f"stopping: running answers have {grace:g} s to finish")
        engine.stop(grace)

    def handle(*_: Any) -> None:
        requested.set()

    for wait in (stop_server, stop_engine):  # started now: later there may be no memory for a thread
        threading.Thread(target=wait, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
