"""A server in several processes (replicas) that Ray Serve runs."""

from __future__ import annotations

import gc
import signal
import threading
from dataclasses import replace

from kvkeep.budget import size
from kvkeep.cli.output import note
from kvkeep.cli.serve.address import Address
from kvkeep.cli.serve.defaults import MEMORY_SHARE, default_cache, default_memory
from kvkeep.cli.serve.process import STOPPED
from kvkeep.cli.startup import fetch_model
from kvkeep.models.loading import describe
from kvkeep.models.weight_memory import free_memory
from kvkeep.native.library import trim_memory
from kvkeep_cluster import replicas
from kvkeep_cluster.replicas import Scale
from kvkeep_cluster.service import ClusterService


def serve_replicas(
    service: ClusterService, scale: Scale, cluster: str | None, address: Address, grace: float, saved: str, access: str
) -> None:
    """Run replicas with Ray Serve.

    Without the address of a ``cluster``, they run until SIGTERM or Ctrl-C; running answers then get ``grace`` seconds
    to finish. Replicas in a ``cluster`` keep running. saved, access: lines to print about the store and keys.
    """
    port = address.port
    if cluster is None:
        service = _with_defaults(service, scale.ongoing, scale.maximum)
        with address.socket() as free:  # finds the port that Ray Serve's proxy uses later
            port = free.getsockname()[1]
    with replicas.cluster(cluster, scale):
        stopped = threading.Event()
        if cluster is None:  # after Ray sets its handlers, which abort, and before replicas start
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stopped.set())
        proxy = Address(*replicas.deploy(service, scale, address.host, port, address.tls))
        count = f"{scale.minimum}" if scale.minimum == scale.maximum else f"{scale.minimum} to {scale.maximum}"
        memory = f"{(service.memory or 0) / 1e6:.0f} MB for all conversations of a replica"
        note(f"{proxy.url(proxy.port)}/v1  model '{service.model}', {memory}")
        if (proxy.host, proxy.port) != (address.host, port):
            note("the cluster's proxies listen there already; --host and --port do not change that")
        cores = "1 core" if scale.cores == 1 else f"{scale.cores:g} cores"
        cache = ", ".join(f"{name} {value}" for name, value in service.cache.items())
        note(f"{count} replicas with {cores} each; default cache: {cache}")
        note(saved)
        note(access)
        if cluster is not None:
            _describe_cluster()
            return
        stopped.wait()
        note(f"stopping: running answers have {grace:g} s to finish")
        failed = replicas.drain(grace)
    note(f"stopped; {failed} replicas did not reply, and their unsaved turns are lost" if failed else STOPPED)


def _with_defaults(service: ClusterService, conversations: int, processes: int) -> ClusterService:
    """Return ``service`` with a memory and a cache for each of ``processes``, before any of them runs. A model loaded
    for it is freed again. Raises the errors of loading for an unsupported model."""
    fetch_model(service.model)
    if service.memory is not None and service.cache:
        describe(service.model, weights=service.weights, device=service.device or "cpu", pre=service.pre, progress=note)
        return service
    loaded = service.load(note)
    if service.memory is None:
        free = free_memory(next(loaded.model.parameters()).device)
        memory = min(default_memory(loaded, conversations)[0], free // MEMORY_SHARE // processes)
        note(f"memory: {size(memory)} for each replica (change it with --memory)")
        service = replace(service, memory=memory)
    if not service.cache:
        service = replace(service, cache=default_cache(loaded, service.memory or 0, conversations))
    del loaded
    gc.collect()  # models have reference cycles
    trim_memory()
    return service


def _describe_cluster() -> None:
    """Print what the cluster's processes lack, and how to stop the replicas."""
    if missing := replicas.lacking():
        variables = " ".join(f"{name}={value}" for name, value in missing.items())
        note(f"start the cluster's processes with {variables}; docs/replicas.md explains these variables")
        if replicas.TOKEN.items() <= missing.items():
            note("the cluster has no token: anyone who reaches the ports of its machines can run code on them")
    note("the cluster keeps the replicas running; 'serve shutdown' ends them, and repeating this command replaces them")
