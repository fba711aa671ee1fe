"""Replicas of the server on a Ray cluster: each process of a Ray Serve deployment runs the same application.

A session belongs to no replica. Its turns are in a store that all replicas see, and a turn is saved only if no other
replica has continued the session meanwhile. So any replica can answer any request.
Consistent hashing sends all requests of a session to one replica, as long as it exists, so that it has the session in
memory.
:mod:`~kvkeep_cluster.proxy` runs in Serve's proxies: it sets the hashed key, and completes answers of replicas that
ended.

This is the only module that imports ray.serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from kvkeep.errors import KvkeepError, UsageError, unknown
from kvkeep.models.loading import DEFAULT
from kvkeep.plugins import first_line
from kvkeep.policies.endless import ENDLESS
from kvkeep.serve.engine import WAITING
from kvkeep.serve.http.app import alive, log_requests
from kvkeep.serve.http.connection import KEEP_ALIVE_S
from kvkeep.serve.http.keys import keys_given
from kvkeep_cluster import ray_cluster
from kvkeep_cluster.ray_cluster import ClusterEnded, connected
from kvkeep_cluster.service import ClusterService

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "kvkeep_cluster.proxy:middleware",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""The required environment of the cluster's processes. The first variable adds the middleware to the proxies. With the
second, Serve's controller kills a replica that fails its health check, instead of waiting an hour for its answers."""
TOKEN = {"RAY_AUTH_MODE": "token"}
"""The variable that requires a token. Without it, everyone who reaches the cluster's ports can run code there."""
NAME = "kvkeep"
"""The name of the application in the cluster."""
DEFAULT_DRAIN_S = 3600.0
"""Seconds for a replaced replica to finish its answers, if answers have no time limit."""
FIGURES_S = 5.0
"""Seconds that a scrape waits for the other replicas. It omits the figures of replicas that do not answer."""
CHECK_S = 0.5
"""Seconds between checks that the cluster still answers, while replicas finish their answers."""
SERVE_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
"""Serve's log settings."""
OPTIONS: dict[str, Any] = {
    "model": DEFAULT, "weights": "auto", "device": None, "pre": None, "waiting": WAITING, "bucket": None,
    "quota": None, "age": None, "at_end": None, "drafts": True, "as_sent": False, "pin": None,
    "capacity": None, "keys": None, "answers": 64, "time": None, "cors": (), "log_requests": False,
    "replicas": "2", "cores": 1, "conversations": 8,
}  # fmt: skip
"""Optional options of ``kvkeep serve`` for :func:`app`, and their defaults."""
NUMBERS: tuple[tuple[str, float, Callable[[str], Any]], ...] = (
    ("waiting", 1, int), ("answers", 1, int), ("capacity", 1, int), ("age", 0, float), ("time", 0.1, float),
)  # fmt: skip
"""Options that are numbers, the least of each, and its type."""
NEEDED = ("memory", "sessions")
CACHE = ("method", "budget")
"""Cache options; :func:`app` requires at least one."""
MAX_CORES = 10**6
ONGOING = 1000
"""Requests that Serve passes to a replica at the same time. An engine refuses excess requests itself."""


@dataclass(frozen=True)
class Scale:
    """The number of replicas, chosen by Serve's autoscaling between two limits, and the cores of each."""

    minimum: int
    maximum: int
    cores: float
    """Cores of each replica."""
    ongoing: int
    """Simultaneous answers per replica; autoscaling's target."""

    @classmethod
    def parse(cls, text: Any, cores: Any, ongoing: Any) -> Scale:
        """Parse ``N`` or ``MIN:MAX``, and two numbers. Raises UsageError."""
        numbers = (
            [int(one) for one in str(text).split(":")] if re.fullmatch("[0-9]{1,9}(:[0-9]{1,9})?", str(text)) else [0]
        )
        if not 1 <= numbers[0] <= numbers[-1]:
            raise UsageError(f"'{text}' is not a number of replicas; give a number (2), or minimum and maximum (1:8).")
        limits = number("cores", cores, 0.1), number("conversations", ongoing, 1, int)
        if numbers[-1] > MAX_CORES / limits[0]:
            raise UsageError(
                f"{numbers[-1]} replicas with {limits[0]:g} cores each are more than any cluster has; give fewer."
            )
        return cls(numbers[0], numbers[-1], *limits)

    def options(self) -> dict[str, Any]:
        """Return the options of Serve's deployment."""
        if self.minimum == self.maximum:
            return {"num_replicas": self.minimum}
        limits = {"min_replicas": self.minimum, "max_replicas": self.maximum}
        return {"autoscaling_config": limits | {"target_ongoing_requests": self.ongoing}}


class Replica:
    """One process with a model, its engine, and the application of ``kvkeep serve``. Serve creates and calls it."""

    def __init__(self, service: ClusterService) -> None:
        self.loaded = service.load()
        self.engine = service.engine(self.loaded)
        self.service, self.context = service, ray_serve().get_replica_context()
        if service.log_requests:
            log_requests()
        self.engine.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        made = self.service.application(self.engine, self.loaded, self._everywhere)
        self._metrics = made.state.metrics
        return made

    def _watch(self) -> None:
        """End the process when the engine has failed; Serve starts another one at once."""
        self.engine.join()
        if self.engine.fault is not None:
            time.sleep(1.0)  # waiting clients get their errors first
            os._exit(1)

    def check_health(self) -> None:
        """Raise if the engine is not alive. Serve replaces a replica after three failures."""
        if not alive(self.engine):
            raise KvkeepError("The engine does not respond.")

    async def figures(self) -> tuple[str, bytes]:
        """Return this replica's name and figures."""
        return self.context.replica_tag, await self._metrics.scraped()

    async def _everywhere(self) -> bytes:
        """Return the figures of all replicas."""
        replies = ray_serve().get_app_handle(self.context.app_name).broadcast("figures")
        found = await replies.results_async(timeout_s=FIGURES_S, return_exceptions=True)
        return labelled(one for one in found if not isinstance(one, BaseException))

    async def drain(self, grace: float) -> None:
        """Refuse new requests, let answers finish within ``grace`` seconds, and save all turns."""
        await asyncio.to_thread(self.engine.stop, grace)

    async def __del__(self) -> None:
        await self.drain(0.0)  # Serve has waited for the answers


def labelled(figures: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the figures of several replicas as one text. Each figure has a label with its replica."""
    families: dict[str, Metric] = {}
    for name, text in figures:
        for one in text_string_to_metric_families(text.decode()):
            family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            family.samples += [sample._replace(labels={"replica": name, **sample.labels}) for sample in one.samples]

    collector: Any = SimpleNamespace(collect=families.values)
    return generate_latest(collector)


# -- in the command ---------------------------------------------------------------------------------------


def ray_serve() -> Any:
    """Return Ray Serve. Raises UsageError if it is not installed."""
    try:
        import mmh3  # noqa: F401 - required by its router
        import ray.serve
    except ImportError as error:
        raise UsageError(
            f"--replicas needs Ray Serve, and there is no '{error.name}' here: pip install ./connectors/cluster (in a "
            "clone of the repository)."
        ) from error
    return ray.serve


@contextmanager
def cluster(address: str | None, scale: Scale) -> Iterator[None]:
    """Connect to a Ray cluster for the block. Without an address, start a cluster on this machine, and end it
    afterwards. Raises KvkeepError if the connection fails."""
    ray_serve()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # only in this process, which reports events
    cores = math.ceil(scale.maximum * scale.cores)
    # Ray prints messages about dead processes. stderr shows them immediately; stdout would buffer them.
    with redirect_stdout(sys.stderr), connected(address, cores, environment=ENVIRONMENT):
        yield


def deploy(
    service: ClusterService, scale: Scale, host: str, port: int, tls: Mapping[str, str]
) -> tuple[str, int, Mapping[str, str]]:
    """Run the replicas in the cluster; return when all accept requests. Return host, port and tls of the cluster's
    proxies; they are the given ones if the cluster had no proxies.

    Replicas of an earlier call end one by one, each after its answers. Raises UsageError if the HTTPS files differ from
    those of running proxies, and KvkeepError if the replicas cannot start; then replicas of an earlier call that have
    not ended continue.
    """
    from ray.exceptions import RayError

    serve = ray_serve()
    http = {"host": host, "port": port, "request_timeout_s": None, "keep_alive_timeout_s": KEEP_ALIVE_S, **tls}
    try:
        serve.start(proxy_location="EveryNode", http_options=http, logging_config=SERVE_LOGGING)
        there = _proxies(serve)
        if tls and there[2] != tls:
            speak = "HTTPS by other files" if there[2] else "HTTP"
            raise UsageError(
                f"The cluster has proxies that speak {speak}, and --certificate and --private-key cannot change "
                "them; leave these options out, or first end Serve ('serve shutdown')."
            )
        serve.run(bound(service, scale), name=NAME, route_prefix="/", logging_config=SERVE_LOGGING)
    except (RuntimeError, TimeoutError, RayError) as error:
        raise KvkeepError(f"The replicas did not start: {_why(serve) or first_line(error)}") from error
    return there


def _proxies(serve: Any) -> tuple[str, int, Mapping[str, str]]:
    """Return host, port and HTTPS files of the cluster's proxies. Once it has proxies, Serve ignores other values."""
    config = serve.context._get_global_client().http_config
    files = {name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile")}
    return config.host, config.port, {name: file for name, file in files.items() if file}


def _why(serve: Any) -> str:
    """Return Serve's information about an application that did not start: the last line of its replica's error, and the
    number of running replicas."""
    with suppress(Exception):
        found = serve.status().applications[NAME]
        deployment = found.deployments.get(NAME)
        message = (deployment and deployment.message) or found.message
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        why = re.sub(r"^kvkeep\.errors\.\w+: ", "", lines[-1])
        return why if deployment is None else f"{why} Replicas that run: {deployment.replica_states.get('RUNNING', 0)}."
    return ""


def bound(service: ClusterService, scale: Scale) -> Any:
    """Return the application in the form that Serve runs."""
    serve = ray_serve()
    made = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        max_ongoing_requests=ONGOING,
        ray_actor_options={"num_cpus": scale.cores, "num_gpus": int((service.device or "").startswith("cuda"))},
        request_router_config={"request_router_class": ROUTER},
        graceful_shutdown_timeout_s=(service.limits.seconds or DEFAULT_DRAIN_S) + 30,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=SERVE_LOGGING,
        **scale.options(),
    )
    return made.bind(service)


def app(given: Mapping[str, Any]) -> Any:
    """Return the application for Serve's configuration files, which name it as ``kvkeep_cluster.replicas:app``.

    given: options of ``kvkeep serve`` by name, with underscores: all of :data:`NEEDED`, at least one of :data:`CACHE`,
    and any of :data:`OPTIONS`. Keys come from KVKEEP_API_KEYS and from the file ``keys``. Raises UsageError.
    """
    for name in given:
        if name not in (every := {*OPTIONS, *NEEDED, *CACHE}):
            raise unknown("option", name, every)
    options = OPTIONS | {name: value for name, value in given.items() if value is not None}
    cache = {name: options[name] for name in CACHE if name in options}
    missing = [f"'{name}'" for name in NEEDED if name not in options] + ([] if cache else ["'method' or 'budget'"])
    if missing:
        raise UsageError(f"The application needs {' and '.join(missing)}; give it among its arguments.")
    scale = Scale.parse(options["replicas"], options["cores"], options["conversations"])
    return bound(ClusterService.parse(_typed(options), cache, keys_given(options["keys"])), scale)


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    """Return options that a configuration file may give as text. Raises UsageError."""
    found = {
        name: None if options[name] is None else number(name, options[name], least, kind)
        for name, least, kind in NUMBERS
    }
    cors, logs, at_end = (options[name] for name in ("cors", "log_requests", "at_end"))
    if str(logs).lower() not in ("true", "false"):
        raise UsageError(f"The option 'log_requests' has to be true or false, not '{logs}'.")
    if at_end not in (None, ENDLESS):
        raise UsageError(f"The option 'at_end' can only be '{ENDLESS}', not '{at_end}'.")
    found["log_requests"] = str(logs).lower() == "true"
    found["cors"] = (cors,) if isinstance(cors, str) else tuple(cors)
    return options | found


def number(name: str, value: Any, least: float, kind: Callable[[str], Any] = float) -> Any:
    """Return the value of the option ``name`` as a number. Raises UsageError unless it is at least ``least``."""
    try:
        number = kind(str(value))
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        what = "an integer" if kind is int else "a number"
        raise UsageError(f"The option '{name}' has to be {what} of at least {least:g}, not '{value}'.")
    return number


def drain(grace: float) -> int:
    """Let all replicas finish their answers within ``grace`` seconds and save all turns. Return the number of replicas
    that did not confirm it; the clients of a dead replica already have an error.

    Raises ClusterEnded if the cluster's processes end meanwhile, for example after a signal to the whole process group.
    """
    found: Future[int] = Future()
    threading.Thread(target=_drain, args=(grace, found), daemon=True).start()
    while True:
        try:
            return found.result(CHECK_S)
        except Exception:  # the replica is not ready or has failed
            if not ray_cluster.alive():
                raise ClusterEnded(
                    "The signal also ended Ray's processes. Running answers were cut off; finished turns are saved."
                ) from None
            if found.done():
                raise


def _drain(grace: float, found: Future[int]) -> None:
    from ray.exceptions import ActorDiedError

    try:
        serve = ray_serve()
        states = serve.status().applications[NAME].deployments[NAME].replica_states
        replies = serve.get_app_handle(NAME).broadcast("drain", grace)
        try:
            results = replies.results(timeout_s=grace + 30, return_exceptions=True)
        except TimeoutError as error:
            results = [error] * states.get("RUNNING", 0)
        silent = [one for one in results if isinstance(one, BaseException) and not isinstance(one, ActorDiedError)]
        found.set_result(len(silent) + states.get("STOPPING", 0))  # stopping replicas are only counted
    except Exception as error:
        found.set_exception(error)


def lacking() -> dict[str, str]:
    """Return the values of :data:`ENVIRONMENT` and :data:`TOKEN` that the cluster was started without."""
    import ray

    wanted = ENVIRONMENT | TOKEN
    there: Any = ray.get(ray.remote(num_cpus=0)(lambda: {name: os.environ.get(name) for name in wanted}).remote())
    return {name: value for name, value in wanted.items() if there[name] != value}
