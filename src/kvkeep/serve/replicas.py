"""Replicas of the server on a Ray cluster: the same application, once in every process of a Ray Serve deployment.

A session belongs to no replica. Its turns are in a folder that all replicas see, and whoever answers holds its lease
(:mod:`~kvkeep.decode.journal`), so that any replica can answer any request. Consistent hashing on the session lets the
same one do it as long as there is one, which then has the session in memory. :mod:`~kvkeep.serve.http.front` runs in
Serve's proxies, names the session where Serve's router looks for it, and tells clients of replicas that ended.

This is the only module that imports ray.serve.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from kvkeep.budget import bytes_of
from kvkeep.decode.session_store import DAY_S, SessionStore
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.extras import optional
from kvkeep.models.loading import DEFAULT, load
from kvkeep.plugins import first_line
from kvkeep.policies.request import Request
from kvkeep.ray_cluster import connected
from kvkeep.serve.engine import WAITING, Engine
from kvkeep.serve.http.app import alive, application
from kvkeep.serve.http.asked import Limits
from kvkeep.serve.http.connection import IDLE_S
from kvkeep.serve.http.door import log_all
from kvkeep.serve.http.keys import Keys, keys_given

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
FRONT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "kvkeep.serve.http.front:front"}
"""What the processes of the cluster have to have in their environment, so that its proxies have the front."""
NAME = "kvkeep"
"""Of the application within the cluster."""
WHOLE_S = 3600.0
"""Seconds that a replica which makes way for another one has to end its answers in, where they have no time."""
FIGURES_S = 5.0
"""Seconds that a scrape waits for the other replicas; the figures of one that does not answer are left out."""
QUIET = {"enable_access_log": False, "log_level": "WARNING"}
"""What Serve logs."""
OPTIONS: dict[str, Any] = {
    "model": DEFAULT, "weights": "auto", "device": None, "waiting": WAITING, "quota": None, "age": None, "keys": None,
    "answers": 64, "time": None, "replicas": "2", "cores": 1, "conversations": 8,
}  # fmt: skip
"""Of :func:`app`, and what they are where they are not given."""
ONGOING = 1000
"""Requests that Serve passes to a replica at once: an engine refuses by itself what is too many."""


@dataclass(frozen=True)
class Service:
    """What every replica serves; all but ``keys`` as ``kvkeep serve`` takes it. memory: bytes of one replica. cache:
    method and budget of sessions that name none."""

    model: str
    weights: str
    device: str | None
    memory: int
    waiting: int
    cache: Mapping[str, Any]
    folder: str
    quota: int | None
    age: float | None
    keys: Keys
    limits: Limits
    origins: tuple[str, ...] = ()
    logs: bool = False


@dataclass(frozen=True)
class Size:
    """How many replicas there are, between ``least`` and ``most`` by Serve's autoscaling, each with so many cores.
    ongoing: answers of one replica at which autoscaling aims."""

    least: int
    most: int
    cores: float
    ongoing: int

    @classmethod
    def parse(cls, text: str, cores: float, ongoing: int) -> Size:
        """Read ``N`` or ``MIN:MAX``. Raises UsageError."""
        numbers = [int(one) for one in text.split(":")] if re.fullmatch("[0-9]+(:[0-9]+)?", text) else [0]
        if not 1 <= numbers[0] <= numbers[-1]:
            raise UsageError(f"'{text}' is no number of replicas: give one (2), or the least and the most (1:8).")
        return cls(numbers[0], numbers[-1], cores, ongoing)

    def options(self) -> dict[str, Any]:
        """Return it as Serve takes it."""
        if self.least == self.most:
            return {"num_replicas": self.least}
        scale = {"min_replicas": self.least, "max_replicas": self.most, "target_ongoing_requests": self.ongoing}
        return {"autoscaling_config": scale}


class Replica:
    """One process: a model, its engine, and the application of ``kvkeep serve``. Serve makes and asks it."""

    def __init__(self, service: Service) -> None:
        own = service
        self.loaded = load(own.model, weights=own.weights, device=own.device)
        store = SessionStore(own.folder, quota=own.quota, age=own.age, shared=True)
        store.check_folder()
        self.engine = Engine(self.loaded, own.memory, own.waiting, store, **own.cache)
        self.service, self.context = service, ray_serve().get_replica_context()
        if service.logs:
            log_all()
        self.engine.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application."""
        own = self.service
        made = application(self.engine, self.loaded, own.keys, own.limits, own.origins, self._everywhere)
        self._metrics = made.state.metrics
        return made

    def _watch(self) -> None:
        """End the process when the engine has failed: Serve starts another one at once."""
        self.engine.join()
        if self.engine.fault is not None:
            time.sleep(1.0)  # those who waited are being told
            os._exit(1)

    def check_health(self) -> None:
        """Raise unless the engine lives; Serve replaces a replica that does so three times."""
        if not alive(self.engine):
            raise KvkeepError("The engine does not answer.")

    async def figures(self) -> tuple[str, bytes]:
        """Return this replica's name and figures."""
        return self.context.replica_tag, await self._metrics.scraped()

    async def _everywhere(self) -> bytes:
        """Return the figures of all replicas."""
        asked = ray_serve().get_app_handle(self.context.app_name).broadcast("figures")
        found = await asked.results_async(timeout_s=FIGURES_S, return_exceptions=True)
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

    class All:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(All())
    return generate_latest(registry)


# -- in the command ---------------------------------------------------------------------------------------


def ray_serve() -> Any:
    """Return Ray Serve. Raises UsageError where it is missing."""
    optional("mmh3", "ray")  # which its router needs
    return optional("ray.serve", "ray")


@contextmanager
def cluster(address: str | None, size: Size) -> Iterator[None]:
    """Be connected to a Ray cluster within the block, or start one on this machine, which ends with it. Raises
    KvkeepError where there is none."""
    ray_serve()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # of this process: what happens, it says itself
    with connected(address, math.ceil(size.most * size.cores), environment=FRONT):
        yield


def deploy(service: Service, size: Size, host: str, port: int, tls: Mapping[str, str]) -> None:
    """Let the cluster run the replicas, and return when all of them take requests. Those of an earlier call go one by
    one, each when its answers have ended. host, port, tls: of the proxies, if the cluster has none yet. Raises
    KvkeepError where the replicas cannot start."""
    serve = ray_serve()
    http = {"host": host, "port": port, "request_timeout_s": None, "keep_alive_timeout_s": IDLE_S, **tls}
    try:
        serve.start(proxy_location="EveryNode", http_options=http, logging_config=QUIET)
        serve.run(bound(service, size), name=NAME, route_prefix="/", logging_config=QUIET)
    except (RuntimeError, TimeoutError, optional("ray", "ray").exceptions.RayError) as error:
        raise KvkeepError(f"The replicas did not start: {_why(serve) or first_line(error)}") from error


def _why(serve: Any) -> str:
    """Return what Serve knows of an application that did not start: the last line of its replica's error."""
    with suppress(Exception):
        lines = [line.strip() for line in serve.status().applications[NAME].message.splitlines() if line.strip()]
        return str(lines[-1]) if lines else ""
    return ""


def bound(service: Service, size: Size) -> Any:
    """Return the application as Serve runs it."""
    serve = ray_serve()
    made = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        max_ongoing_requests=ONGOING,
        ray_actor_options={"num_cpus": size.cores, "num_gpus": int((service.device or "").startswith("cuda"))},
        request_router_config={"request_router_class": ROUTER},
        graceful_shutdown_timeout_s=(service.limits.seconds or WHOLE_S) + 30,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=QUIET,
        **size.options(),
    )
    return made.bind(service)


def app(given: Mapping[str, str]) -> Any:
    """Return the application for Serve's own files of configuration, where it is ``kvkeep.serve.replicas:app``.

    given: options of ``kvkeep serve`` by name: ``memory`` and ``sessions``, ``method`` or ``budget`` or both, and as
    wanted :data:`OPTIONS`. Keys come from KVKEEP_API_KEYS and from the file ``keys``. Raises UsageError.
    """
    own: dict[str, Any] = OPTIONS | {**given}
    cache: dict[str, Any] = {name: own.pop(name) for name in ("method", "budget") if name in own}
    if wrong := {*own} ^ {*OPTIONS, "memory", "sessions"}:
        raise UsageError(f"The application has other options: {', '.join(sorted(wrong))} is missing or too many.")
    if not cache:
        raise UsageError("The application needs a 'method' or a 'budget'.")
    Request.parse(**cache)
    keys, age, seconds, quota = keys_given(own["keys"]), own["age"], own["time"], own["quota"]
    service = Service(
        own["model"],
        own["weights"],
        own["device"],
        bytes_of(own["memory"]),
        int(own["waiting"]),
        cache,
        own["sessions"],
        None if quota is None else bytes_of(quota, "quota"),
        None if age is None else float(age) * DAY_S,
        Keys(keys),
        Limits(int(own["answers"]) if keys else None, None if seconds is None else float(seconds)),
    )
    return bound(service, Size.parse(str(own["replicas"]), float(own["cores"]), int(own["conversations"])))


def drain(grace: float) -> None:
    """Let all replicas end their answers within ``grace`` seconds, and save all turns."""
    serve = ray_serve()
    asked = serve.get_app_handle(NAME).broadcast("drain", grace)
    asked.results(timeout_s=grace + 30, return_exceptions=True)


def fronted() -> bool:
    """Return whether the cluster was started with :data:`FRONT` in its environment."""
    ray = optional("ray", "ray")
    found: Any = ray.get(ray.remote(num_cpus=0)(lambda: {name: os.environ.get(name) for name in FRONT}).remote())
    return bool(found == FRONT)
