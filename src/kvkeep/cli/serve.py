"""``kvkeep serve``: the server of one model."""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli import completion
from kvkeep.cli import options as o
from kvkeep.cli.output import note
from kvkeep.errors import BudgetError, KvkeepError, UsageError
from kvkeep.extras import optional

if TYPE_CHECKING:
    from kvkeep.models.loading import Loaded
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.replicas import Scale, Service

UNBOUNDED = 8192
"""Tokens of a conversation that is planned for, where a model has no number of positions."""
ENDED = "ended; every turn is saved"


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
            autocompletion=completion.methods,
            show_default="kv-direct with a budget, the planner's choice without",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", "-b", help="Of sessions that name none: entries per layer (512), bytes (64MB), a share (25%)."
        ),
    ] = None,
    conversations: Annotated[
        int, typer.Option(min=1, help="Without method and budget: as many at full length share the memory.")
    ] = 8,
    weights: o.Weights = "auto",
    device: o.Device = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that answers have to end in after SIGTERM.")] = 10.0,
    waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait, for memory or for another answer.")] = 64,
    keys: Annotated[str | None, typer.Option(metavar="FILE", help="A file of keys, one a line; '#': comment.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers of one key at once, waiting ones included.")] = 64,
    time: Annotated[float | None, typer.Option(min=0.1, help="Seconds after which an answer is cut.")] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Pages of this origin may speak to it (https://chat.example); repeatable."),
    ] = None,
    certificate: Annotated[str | None, typer.Option(metavar="FILE", help="For HTTPS: the certificate (PEM).")] = None,
    private_key: Annotated[str | None, typer.Option(metavar="FILE", help="For HTTPS: its private key (PEM).")] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="A line on standard error for each request; nothing of its text.")
    ] = False,
    sessions: o.Sessions = None,
    quota: Annotated[
        str | None,
        typer.Option(help="Bytes of all sessions in the folder (10GB); the oldest go.", show_default="none"),
    ] = None,
    age: Annotated[
        float | None, typer.Option(min=0, help="Days after which a session is removed.", show_default="none")
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Processes that Ray Serve runs, each with --memory; MIN:MAX for as many as are needed.",
            show_default="this process alone",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The Ray cluster for --replicas, which it goes on running; auto: the one of this machine.",
            show_default="one that is started here, and ends",
        ),
    ] = None,
    cores: Annotated[
        float | None,
        typer.Option(min=0.1, help="Cores of each of --replicas.", show_default="an equal share, or 1 with --ray"),
    ] = None,
) -> None:
    """Serve many conversations over HTTP within one memory, as OpenAI's clients speak.

    Keys come from KVKEEP_API_KEYS, by commas, and from --keys; listening beyond this machine without any makes one,
    which is kept in the user's folder and used again.
    """
    uvicorn = optional("uvicorn", "serve")
    optional("fastapi", "serve")
    optional("prometheus_client", "serve")
    from kvkeep.budget import bytes_of
    from kvkeep.decode.session_store import DAY_S, SessionStore, sessions_folder
    from kvkeep.models.loading import load
    from kvkeep.policies.request import Request
    from kvkeep.serve.engine import Engine
    from kvkeep.serve.http.app import application
    from kvkeep.serve.http.asked import Limits
    from kvkeep.serve.http.door import check_origins, log_all
    from kvkeep.serve.http.keys import Keys, kept_key, keys_given

    _check_replicas(replicas, ray, cores, memory, method or budget, sessions)
    given, kept, new = keys_given(keys), None, False
    if not given and not _own(host):
        key, kept, new = kept_key()
        given = [key]
    check_origins(cors or (), bool(given))
    tls = _tls(certificate, private_key)
    total = None if memory is None else bytes_of(memory)
    cache: dict[str, Any] = {name: one for name, one in (("method", method), ("budget", budget)) if one is not None}
    Request.parse(**cache)
    folder, limit = sessions_folder(sessions), None if quota is None else bytes_of(quota, "quota")
    seconds = None if age is None else age * DAY_S
    limits = Limits(answers if given else None, time)
    kept_for = "" if limit is None else f", at most {quota} together: the least recently used are removed"
    kept_for += "" if age is None else f", {age:g} days at most"
    if kept is not None:
        access = f"key: {given[0] if new else 'as before'}  (kept in {kept})"
    elif given:
        access = f"{len(given)} keys"
    else:
        access = "no key: " + (
            "only this machine can reach it" if ray is None else "whoever reaches a proxy may use it"
        )
    store = SessionStore(folder, quota=limit, age=seconds, shared=replicas is not None)
    if ray is None:
        store.check_folder()
    if replicas is not None:
        from kvkeep.serve.replicas import Scale, Service

        own = cores or (1 if ray is not None else max(1, (os.cpu_count() or 1) // Scale.parse(replicas, 1, 1).most))
        scale = Scale.parse(replicas, own, conversations)
        if ray is None:
            total, cache = _beforehand(model, weights, device, total, cache, conversations, scale.most)
        options: dict[str, Any] = {
            "model": model, "weights": weights, "device": device, "memory": total, "waiting": waiting, "quota": quota,
            "age": age, "sessions": folder.absolute(), "answers": answers, "time": time, "cors": cors or (),
            "log_requests": log_requests,
        }  # fmt: skip
        service = Service.parse(options, cache, given)
        _replicated(service, scale, ray, (host, port, tls), grace, [f"sessions: {folder}{kept_for}", access])
        return
    loaded = load(model, weights=weights, device=device, progress=note)
    total, cache = _settled(loaded, total, cache, conversations)
    listening = _socket(host, port)
    where = _where(host, listening.getsockname()[1], tls)
    engine = Engine(loaded, total, waiting, store, **cache)
    app = application(engine, loaded, Keys(given), limits, cors or ())
    server = _server(uvicorn, app, timeout_graceful_shutdown=int(grace) + 1, **tls)
    _many_files()
    fitting = _fitting(engine)  # makes a cache, for which a method may measure the model: before it is the engine's
    engine.start()
    note(f"{where}/v1  model '{loaded.name}', {total / 1e6:.0f} MB for all conversations; a page at {where}/")
    if _address(host).strip("[]") != host:
        note("from elsewhere: this machine's name or address instead")
    note(fitting)
    refusal = engine.sessions.refusal
    note(f"sessions: {folder}{kept_for}" if refusal is None else f"sessions end with the server. {refusal}")
    note(access)
    if log_requests:
        log_all()
    _drain(server, engine, grace)
    server.run(sockets=[listening])
    if engine.fault is not None:
        raise KvkeepError("The server ends, because its engine has failed.")  # where, the engine has logged
    engine.stop(0.0)
    note(ENDED if refusal is None else "ended")


def _check_replicas(
    replicas: str | None, ray: str | None, cores: float | None, memory: object, method: object, sessions: object
) -> None:
    """Raise UsageError for options of replicas that go with none, and for what a cluster elsewhere has to be told."""
    if replicas is None and (ray is not None or cores is not None):
        raise UsageError("--ray and --cores are for --replicas; give their number.")
    if ray is not None:
        needed = {"--memory": memory, "--method or --budget": method, "--sessions": sessions}
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise UsageError(
                f"With --ray give {' and '.join(missing)}: machines differ in memory, and sessions have to be in a "
                "folder that all of them share."
            )


def _beforehand(
    model: str,
    weights: str,
    device: str | None,
    total: int | None,
    cache: dict[str, Any],
    conversations: int,
    most: int,
) -> tuple[int, dict[str, Any]]:
    """Return what :func:`_settled` does for each of ``most`` replicas here. A model that is loaded for that is gone
    afterwards. Raises as loading does for one that cannot be served."""
    from kvkeep.models.freed import give_back
    from kvkeep.models.loading import describe, load

    if total is not None and cache:
        describe(model, weights=weights, device=device or "cpu", progress=note)
        return total, cache
    loaded = load(model, weights=weights, device=device, progress=note)
    found = _settled(loaded, total, cache, conversations, most)
    del loaded
    gc.collect()  # a model refers to itself
    give_back()
    return found


def _settled(
    loaded: Loaded, total: int | None, cache: dict[str, Any], conversations: int, processes: int = 1
) -> tuple[int, dict[str, Any]]:
    """Return the bytes for conversations, and what sessions are that name nothing: as given, else half of what is free
    for all ``processes``, and the planner's choice."""
    from kvkeep.models.room import free_memory

    if total is None:
        total = free_memory(next(loaded.model.parameters()).device) // 2 // processes
    return total, cache or _planned(loaded, total, conversations)


def _replicated(
    service: Service,
    scale: Scale,
    address: str | None,
    listening: tuple[str, int, dict[str, Any]],
    grace: float,
    said: list[str],
) -> None:
    """Have Ray Serve run replicas: until SIGTERM or Ctrl-C in a cluster that ends with them, else for good."""
    from kvkeep.serve import replicas

    host, port, tls = listening
    if address is None:
        with _socket(host, port) as free:  # Serve's proxy takes its place
            port = free.getsockname()[1]
    with replicas.cluster(address, scale):
        ended = threading.Event()
        if address is None:  # before replicas start, and after Ray has set handlers of its own, which abort
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *given: ended.set())
        replicas.deploy(service, scale, host, port, tls)
        kinds = f"{scale.least}" if scale.least == scale.most else f"{scale.least} to {scale.most}"
        note(
            f"{_where(host, port, tls)}/v1  model '{service.model}', {service.memory / 1e6:.0f} MB for all "
            "conversations of a replica"
        )
        threads = "a core" if scale.cores == 1 else f"{scale.cores:g} cores"
        kept = ", ".join(f"{name} {value}" for name, value in service.cache.items())
        note(f"{kinds} replicas with {threads} each; by default {kept}")
        for line in said:
            note(line)
        if address is not None:
            if missing := replicas.lacking():
                own = " ".join(f"{name}={value}" for name, value in missing.items())
                note(f"start the cluster's processes with {own}: docs/replicas.md says what they do")
                if replicas.TOKEN.items() <= missing.items():
                    note("the cluster has no token: whoever reaches the ports of its machines can run code there")
            note("the cluster runs them; 'serve shutdown' ends them, and the same command again replaces them")
            return
        ended.wait()
        note(f"ending: answers have {grace:g} s")
        silent = replicas.drain(grace)
    note(f"ended; replicas that did not answer, and lost what they had not saved: {silent}" if silent else ENDED)


def _planned(loaded: Loaded, total: int, conversations: int) -> dict[str, Any]:
    """Return what sessions are that name nothing: the planner's choice of exact caches for so many conversations of as
    many tokens as there are positions. Raises UsageError where nothing fits."""
    from kvkeep.geometry import ModelGeometry
    from kvkeep.plan.planner import ANSWER, recommend

    positions = ModelGeometry.from_config(loaded.model.config, 2).max_positions or UNBOUNDED
    answer = min(ANSWER, positions // 2)
    try:
        choice = recommend(loaded.model, positions - answer, total // conversations, answer=answer, tell=note)
    except BudgetError as error:
        raise UsageError(f"{error} Give more --memory, fewer --conversations, or a --method.") from error
    return {name: value for name, value in choice.options().items() if value is not None}


def _fitting(engine: Engine) -> str:
    """Return, in a sentence, what sessions are that name nothing, and how many of them fit."""
    from kvkeep.cache import KeepCache

    cache, tokens = KeepCache(engine.model, **engine.cache), engine.geometry.max_positions or UNBOUNDED
    kind = f"'{cache.method.name}'" + ("" if cache.entries is None else f" with {cache.entries} entries a layer")
    fit = engine.arbiter.fitting(cache, tokens)
    if not fit:
        return f"by default {kind} ({cache.exactness}): none of {tokens:,} tokens fits, only shorter conversations"
    return f"by default {kind} ({cache.exactness}): {fit} conversations of {tokens:,} tokens at once, and more in turns"


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


def _address(host: str) -> str:
    """Return how a browser of this machine names ``host``, also where that is every address of it."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{own}]" if ":" in own else own


def _where(host: str, port: int, tls: Mapping[str, Any]) -> str:
    """Return the server's address for a browser of this machine."""
    return f"http{'s' if tls else ''}://{_address(host)}:{port}"


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


def _tls(certificate: str | None, private_key: str | None) -> dict[str, Any]:
    """Return what uvicorn is told for HTTPS, and nothing for HTTP. Raises UsageError for files that do not do."""
    if certificate is None and private_key is None:
        return {}
    if certificate is None or private_key is None:
        raise UsageError("HTTPS takes both --certificate and --private-key.")
    import ssl

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, private_key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise UsageError(f"'{certificate}' with '{private_key}' cannot be used for HTTPS: {reason}.") from error
    return {"ssl_certfile": certificate, "ssl_keyfile": private_key}


def _server(uvicorn: Any, app: Any, **given: Any) -> Any:
    """Return a server that leaves signals to us: answers end before connections do."""
    from kvkeep.serve.http.connection import configured

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(configured(app, **given))


def _drain(server: Any, engine: Engine, grace: float) -> None:
    """On SIGTERM and Ctrl-C take no more, let answers end within ``grace`` seconds, and leave; leave also when the
    engine ends by itself."""

    def watch() -> None:
        engine.join()
        server.should_exit = True

    def stop() -> None:
        note(f"ending: answers have {grace:g} s")
        engine.stop(grace)

    def drain(*given: Any) -> None:
        threading.Thread(target=stop, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
    threading.Thread(target=watch, daemon=True).start()
