"""A server in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from kvkeep.cli.output import note
from kvkeep.cli.serve.defaults import fitting, settled
from kvkeep.cli.serve.listening import Listening
from kvkeep.cli.starting import starting
from kvkeep.errors import KvkeepError
from kvkeep.models.loading import load
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.connection import uvicorn_config
from kvkeep.serve.http.middleware import log_requests
from kvkeep.serve.measuring import Measuring
from kvkeep.serve.service import Service

ENDED = "stopped; all turns are saved"


def answer(
    service: Service,
    listening: Listening,
    conversations: int,
    grace: float,
    said: Sequence[str],
    *,
    measure: bool,
) -> None:
    """Answer until SIGTERM or Ctrl-C, after which answers have ``grace`` seconds. conversations: as many share the
    memory where no cache is named. said: the lines about sessions and keys. measure: measure this machine when there is
    nothing to do. Raises KvkeepError when the engine fails."""
    kept, access = said
    with starting(service.model):
        loaded = load(service.model, weights=service.weights, device=service.device, progress=note)
    service = settled(service, loaded, conversations)
    with listening.socket() as own:
        url = listening.url(own.getsockname()[1])
        engine = service.engine(loaded, shared=False)
        server = _server(service.application(engine, loaded), timeout_graceful_shutdown=int(grace) + 1, **listening.tls)
        _many_files()
        fit = fitting(engine)  # makes a cache, for which a method may measure the model: before it is the engine's
        engine.start()
        size = f"{engine.arbiter.total / 1e6:.0f} MB for all conversations"
        note(f"{url}/v1  model '{loaded.name}', {size}; a page at {url}/")
        if listening.everywhere:
            note("from elsewhere: this machine's name or address instead")
        note(fit)
        refusal = engine.sessions.files.refusal
        note(kept if refusal is None else f"sessions end with the server. {refusal}")
        note(access)
        if service.logs:
            log_requests()
        _drain(server, engine, grace)
        measuring = Measuring(engine, note)
        if measure:
            measuring.start()
        server.run(sockets=[own])
        measuring.stop()
    if engine.fault is not None:
        raise KvkeepError("The server ends, because its engine has failed.")  # where, the engine has logged
    engine.stop(0.0)
    note(ENDED if refusal is None else "stopped")


def _many_files() -> None:
    """Let as many files be open as the system allows: one for each session in memory and each connection."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _server(app: Any, **given: Any) -> uvicorn.Server:
    """Return a server that leaves signals to us: answers end before connections do."""

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(uvicorn_config(app, **given))


def _drain(server: Any, engine: Engine, grace: float) -> None:
    """On SIGTERM and Ctrl-C take no more, let answers end within ``grace`` seconds, and leave; leave also when the
    engine ends by itself."""

    def watch() -> None:
        engine.join()
        server.should_exit = True

    def stop() -> None:
        note(f"stopping: running answers have {grace:g} s to finish")
        engine.stop(grace)

    def drain(*given: Any) -> None:
        threading.Thread(target=stop, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
    threading.Thread(target=watch, daemon=True).start()
