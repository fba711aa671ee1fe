"""A server in this process."""

from __future__ import annotations

import signal
import threading
from typing import Any

from kvkeep.cli.output import note
from kvkeep.cli.serve.address import Address
from kvkeep.cli.serve.defaults import describe_default, with_defaults
from kvkeep.cli.serve.listening import HTTPServer
from kvkeep.cli.startup import startup
from kvkeep.errors import KvkeepError
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.middleware import log_requests
from kvkeep.serve.service import Service

STOPPED = "stopped; all turns are saved"


def serve_here(
    server: HTTPServer,
    service: Service,
    address: Address,
    conversations: int,
    grace: float,
    saved: str,
    access: str,
) -> None:
    """Load the model and serve until SIGTERM or Ctrl-C; running answers then get ``grace`` seconds to finish.

    Args:
        server: listens on ``address`` already.
        conversations: share the memory if the service names no cache.
        saved, access: lines to print about the store and keys.

    Raises:
        KvkeepError: the engine failed.
    """
    with startup(service.model):
        loaded = service.load(note)
    service = with_defaults(service, loaded, conversations)
    engine = service.engine(loaded)
    app = service.application(engine, loaded)
    default = describe_default(engine)  # builds a cache, which may measure the model: before the engine uses it
    engine.start()
    size = f"{engine.arbiter.total / 1e6:.0f} MB for all conversations"
    note(f"{server.url}/v1  model '{loaded.name}', {size}; chat page: {server.url}/")
    if address.is_any:
        note("from another machine, use this machine's name or address instead")
    note(default)
    refusal = engine.sessions.storage.refusal
    note(saved if refusal is None else f"conversations are not stored: {refusal}")
    note(access)
    if service.logs:
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
