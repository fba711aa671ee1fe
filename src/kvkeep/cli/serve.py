"""``kvkeep serve``: the server of one model."""

from __future__ import annotations

import ipaddress
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli import options as o
from kvkeep.cli.output import note
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.extras import optional

DAY_S = 86400.0


def serve(
    memory: Annotated[
        str | None,
        typer.Option(
            help="Bytes that all conversations together may hold (512MB).", show_default="half of what is free"
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes one that is free.")] = 8000,
    model: o.Model = "smollm2",
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-x",
            help="Of sessions that name none; see 'kvkeep methods'.",
            show_default="kv-direct with a budget, full without",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", "-b", help="Of sessions that name none: entries per layer (512), bytes (64MB), a share (25%)."
        ),
    ] = None,
    weights: o.Weights = "auto",
    device: o.Device = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that answers have to end in after SIGTERM.")] = 10.0,
    waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait for memory.")] = 64,
    sessions: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Where named sessions are kept, also over a restart.",
            show_default="$KVKEEP_DATA/sessions, as 'kvkeep sessions' has it",
        ),
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(help="Bytes of all sessions in the folder (10GB); the oldest go.", show_default="none"),
    ] = None,
    age: Annotated[
        float | None, typer.Option(min=0, help="Days after which a session is removed.", show_default="none")
    ] = None,
) -> None:
    """Serve many conversations over HTTP within one memory, as OpenAI's clients speak.

    Keys come from KVKEEP_API_KEYS, by commas; listening beyond this machine without one makes a key.
    """
    uvicorn = optional("uvicorn", "serve")
    optional("fastapi", "serve")
    from kvkeep.decode.session_store import SessionStore
    from kvkeep.models.folders import data_folder
    from kvkeep.models.loading import load
    from kvkeep.models.room import free_memory
    from kvkeep.plan.planner import parse_memory
    from kvkeep.policies.request import Request
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.http.app import application
    from kvkeep.serve.http.keys import VARIABLE, Keys, keys_given, new_key
    from kvkeep.stock import STOCK

    keys = keys_given()
    made = "" if keys or _own(host) else new_key()
    total = None if memory is None else parse_memory(memory)
    cache: dict[str, Any] = {name: one for name, one in (("method", method), ("budget", budget)) if one is not None}
    if method == STOCK:
        raise UsageError("transformers' own cache has no budget and cannot be served; 'full' keeps everything, too.")
    Request.parse(**cache)
    folder = data_folder() / "sessions" if sessions is None else Path(sessions)
    limit = None if quota is None else parse_memory(quota)
    store = SessionStore(folder, quota=limit, age=None if age is None else age * DAY_S)
    loaded = load(model, weights=weights, device=device, progress=note)
    total = free_memory(next(loaded.model.parameters()).device) // 2 if total is None else total
    engine = Engine(loaded, total, waiting, store, **cache)
    app = application(engine, loaded, Keys([made] if made else keys))
    listening = _socket(host, port)
    where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    server = _server(uvicorn, app, grace)
    _many_files()
    engine.start()
    note(f"{where}/v1  model '{loaded.name}', {total / 1e6:.0f} MB for all conversations")
    refusal = engine.sessions.refusal
    note(f"sessions: {folder}" if refusal is None else f"sessions end with the server. {refusal}")
    if made:
        note(f"key: {made}  (made for this run; {VARIABLE} sets your own)")
    elif not keys:
        note("no key: only this machine can reach it")
    _drain(server, engine, grace)
    server.run(sockets=[listening])
    if engine.fault is not None:
        raise KvkeepError(f"The engine has failed ({type(engine.fault).__name__}: {engine.fault}).")
    engine.stop(0.0)


def _many_files() -> None:
    """Let as many files be open as the system allows: one for each session in memory and each connection."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _own(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _socket(host: str, port: int) -> Any:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"Nothing can listen at {host}:{port}: {reason}; take another --port or --host.") from None
    return listening


def _server(uvicorn: Any, app: Any, grace: float) -> Any:
    """Return a server that leaves signals to us: answers end before connections do."""

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(
        uvicorn.Config(app, log_level="warning", timeout_keep_alive=30, timeout_graceful_shutdown=int(grace) + 1)
    )


def _drain(server: Any, engine: Any, grace: float) -> None:
    """On SIGTERM and Ctrl-C take no more, let answers end within ``grace`` seconds, and leave; leave also when the
    engine ends by itself."""

    def watch() -> None:
        engine.join()
        server.should_exit = True

    def drain(*given: Any) -> None:
        threading.Thread(target=engine.stop, args=(grace,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
    threading.Thread(target=watch, daemon=True).start()
