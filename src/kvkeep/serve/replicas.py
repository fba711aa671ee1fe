"""Replicas of the server on a Ray cluster: the same application, once in every process of a Ray Serve deployment.

A session belongs to no replica. Its turns are in a folder that all replicas see, and whoever answers holds its lease
(:mod:`~kvkeep.decode.shared_journal`), so that any replica can answer any request. Consistent hashing on the session
gives its requests to the same replica as long as there is one, which then has the session in memory.
:mod:`~kvkeep.serve.http.ray_proxy` runs in Serve's proxies: it sets the key that is hashed, and completes answers of
replicas that ended.

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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from kvkeep import ray_cluster
from kvkeep.errors import KvkeepError, UsageError, unknown
from kvkeep.extras import optional
from kvkeep.models.loading import DEFAULT, load
from kvkeep.plugins import first_line
from kvkeep.ray_cluster import ClusterEnded, connected
from kvkeep.serve.engine import WAITING
from kvkeep.serve.http.app import alive
from kvkeep.serve.http.connection import KEEP_ALIVE_S
from kvkeep.serve.http.keys import keys_given
from kvkeep.serve.http.middleware import log_requests
from kvkeep.serve.service import Service, number

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "kvkeep.serve.http.ray_proxy:middleware",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""What the processes of the cluster need in their environment: its proxies the middleware; Serve's controller, that it
kills a replica which fails its health check, instead of waiting an hour for its answers."""
TOKEN = {"RAY_AUTH_MODE": "token"}
"""Without it in their environment, whoever reaches the ports of the cluster's machines can run code there."""
NAME = "kvkeep"
"""Of the application within the cluster."""
DEFAULT_DRAIN_S = 3600.0
"""Seconds that a replica has to finish its answers when it is replaced, if answers have no time limit."""
FIGURES_S = 5.0
"""Seconds that a scrape waits for the other replicas; the figures of one that does not answer are left out."""
CHECK_S = 0.5
"""Seconds between two checks whether the cluster still answers, while replicas end their answers."""
SERVE_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
"""What Serve logs."""
OPTIONS: dict[str, Any] = {
    "model": DEFAULT, "weights": "auto", "device": None, "waiting": WAITING, "quota": None, "age": None, "keys": None,
    "answers": 64, "time": None, "cors": (), "log_requests": False, "replicas": "2", "cores": 1, "conversations": 8,
}  # fmt: skip
"""Options of ``kvkeep serve`` that :func:`app` need not be given, and their values then."""
NEEDED = ("memory", "sessions")
CACHE = ("method", "budget")
"""Options that it has to be given; of the cache's, one."""
MAX_CORES = 10**6
ONGOING = 1000
"""Requests that Serve passes to a replica at once: an engine refuses by itself what is too many."""


@dataclass(frozen=True)
class Scale:
    """The number of replicas, and the cores of each. Serve's autoscaling chooses it between two limits."""

    minimum: int
    maximum: int
    cores: float
    """Of each replica."""
    ongoing: int
    """Simultaneous answers of one replica that autoscaling aims at."""

    @classmethod
    def parse(cls, text: Any, cores: Any, ongoing: Any) -> Scale:
        """Read ``N`` or ``MIN:MAX``, and two numbers. Raises UsageError."""
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
        """Return it as Serve takes it."""
        if self.minimum == self.maximum:
            return {"num_replicas": self.minimum}
        limits = {"min_replicas": self.minimum, "max_replicas": self.maximum}
        return {"autoscaling_config": limits | {"target_ongoing_requests": self.ongoing}}


class Replica:
    """One process: a model, its engine, and the application of ``kvkeep serve``. Serve makes and asks it."""

    def __init__(self, service: Service) -> None:
        self.loaded = load(service.model, weights=service.weights, device=service.device)
        self.engine = service.engine(self.loaded, shared=True)
        self.service, self.context = service, ray_serve().get_replica_context()
        if service.logs:
            log_requests()
        self.engine.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        made = self.service.application(self.engine, self.loaded, self._everywhere)
        self._metrics = made.state.metrics
        return made

    def _watch(self) -> None:
        """End the process when the engine has failed: Serve starts another one at once."""
        self.engine.join()
        if self.engine.fault is not None:
            time.sleep(1.0)  # those who waited get their errors first
            os._exit(1)

    def check_health(self) -> None:
        """Raise unless the engine lives; Serve replaces a replica that does so three times."""
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
        """Take no more, let answers end within ``grace`` seconds, and save all turns."""
        await asyncio.to_thread(self.engine.stop, grace)

    async def __del__(self) -> None:
        await self.drain(0.0)  # Serve has waited for the answers


def labelled(figures: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the figures of several replicas as one text, each with a label of its replica."""
    families: dict[str, Metric] = {}
    for name, text in figures:
        for one in text_string_to_metric_families(text.decode()):
            family = families.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            family.samples += [sample._replace(labels={"replica": name, **sample.labels}) for sample in one.samples]

    collector: Any = SimpleNamespace(collect=families.values)
    return generate_latest(collector)


# -- in the command ---------------------------------------------------------------------------------------


def ray_serve() -> Any:
    """Return Ray Serve. Raises UsageError where it is missing."""
    optional("mmh3", "ray")  # which its router needs
    return optional("ray.serve", "ray")


@contextmanager
def cluster(address: str | None, scale: Scale) -> Iterator[None]:
    """Be connected to a Ray cluster within the block, or start one on this machine, which ends with it. Raises
    KvkeepError where there is none."""
    ray_serve()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # of this process: what happens, it says itself
    cores = math.ceil(scale.maximum * scale.cores)
    # Ray prints that a process died: here at once, and not at the end, when a buffer is written.
    with redirect_stdout(sys.stderr), connected(address, cores, environment=ENVIRONMENT):
        yield


def deploy(
    service: Service, scale: Scale, host: str, port: int, tls: Mapping[str, str]
) -> tuple[str, int, Mapping[str, str]]:
    """Let the cluster run the replicas, and return when all of them take requests: host, port and tls of its proxies,
    which are those given if it had none yet. Replicas of an earlier call go one by one, each when its answers have
    ended. Raises UsageError for files for HTTPS that are not those of proxies that it has, and KvkeepError where the
    replicas cannot start; those of an earlier call that have not gone yet go on."""
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
    except (RuntimeError, TimeoutError, optional("ray", "ray").exceptions.RayError) as error:
        raise KvkeepError(f"The replicas did not start: {_why(serve) or first_line(error)}") from error
    return there


def _proxies(serve: Any) -> tuple[str, int, Mapping[str, str]]:
    """Return host, port and files for HTTPS of the cluster's proxies: Serve ignores others once it has some."""
    config = serve.context._get_global_client().http_config
    files = {name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile")}
    return config.host, config.port, {name: file for name, file in files.items() if file}


def _why(serve: Any) -> str:
    """Return what Serve knows of an application that did not start: the last line of its replica's error, and how many
    replicas run."""
    with suppress(Exception):
        found = serve.status().applications[NAME]
        deployment = found.deployments.get(NAME)
        message = (deployment and deployment.message) or found.message
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        why = re.sub(r"^kvkeep\.errors\.\w+: ", "", lines[-1])
        return why if deployment is None else f"{why} Replicas that run: {deployment.replica_states.get('RUNNING', 0)}."
    return ""


def bound(service: Service, scale: Scale) -> Any:
    """Return the application as Serve runs it."""
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
    """Return the application for Serve's own files of configuration, where it is ``kvkeep.serve.replicas:app``.

    given: options of ``kvkeep serve`` by name, with underscores: :data:`NEEDED`, of :data:`CACHE` one at least, and any
    of :data:`OPTIONS`. Keys come from KVKEEP_API_KEYS and from the file ``keys``. Raises UsageError.
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
    return bound(Service.parse(options, cache, keys_given(options["keys"])), scale)


def drain(grace: float) -> int:
    """Let all replicas end their answers within ``grace`` seconds, and save all turns. Return how many did not say that
    they have; of one that had died its clients know. Raises ClusterEnded if the cluster's processes end meanwhile, as
    after a signal to the whole process group."""
    found: Future[int] = Future()
    threading.Thread(target=_drain, args=(grace, found), daemon=True).start()
    while True:
        try:
            return found.result(CHECK_S)
        except Exception:  # not yet, or an error
            if not ray_cluster.alive():
                raise ClusterEnded(
                    "The signal also ended Ray's processes. Running answers were cut off; finished turns are saved."
                ) from None
            if found.done():
                raise


def _drain(grace: float, found: Future[int]) -> None:
    try:
        serve, died = ray_serve(), optional("ray", "ray").exceptions.ActorDiedError
        states = serve.status().applications[NAME].deployments[NAME].replica_states
        replies = serve.get_app_handle(NAME).broadcast("drain", grace)
        try:
            results = replies.results(timeout_s=grace + 30, return_exceptions=True)
        except TimeoutError as error:
            results = [error] * states.get("RUNNING", 0)
        silent = [one for one in results if isinstance(one, BaseException) and not isinstance(one, died)]
        found.set_result(len(silent) + states.get("STOPPING", 0))  # those that go are not asked
    except Exception as error:
        found.set_exception(error)


def lacking() -> dict[str, str]:
    """Return what of :data:`ENVIRONMENT` and :data:`TOKEN` the cluster was started without."""
    ray, wanted = optional("ray", "ray"), ENVIRONMENT | TOKEN
    there: Any = ray.get(ray.remote(num_cpus=0)(lambda: {name: os.environ.get(name) for name in wanted}).remote())
    return {name: value for name, value in wanted.items() if there[name] != value}
