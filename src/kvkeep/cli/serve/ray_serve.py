"""A server in replicas that Ray Serve runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence

from kvkeep.cli.output import note
from kvkeep.cli.serve.address import Address
from kvkeep.cli.serve.defaults import settled_beforehand
from kvkeep.cli.serve.single_process import ENDED
from kvkeep.serve import replicas
from kvkeep.serve.replicas import Scale
from kvkeep.serve.service import Service


def serve_replicas(
    service: Service, scale: Scale, address: str | None, listening: Address, grace: float, said: Sequence[str]
) -> None:
    """Have Ray Serve run replicas: until SIGTERM or Ctrl-C, after which answers have ``grace`` seconds, in a cluster
    that ends with them, else, in the one at ``address``, for good. said: lines about sessions and keys."""
    if address is None:
        service = settled_beforehand(service, scale.ongoing, scale.most)
    port = listening.port
    if address is None:
        with listening.socket() as free:  # Serve's proxy takes its place
            port = free.getsockname()[1]
    with replicas.cluster(address, scale):
        ended = threading.Event()
        if address is None:  # before replicas start, and after Ray has set handlers of its own, which abort
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *given: ended.set())
        there = Address(*replicas.deploy(service, scale, listening.host, port, listening.tls))
        kinds = f"{scale.least}" if scale.least == scale.most else f"{scale.least} to {scale.most}"
        size = f"{(service.memory or 0) / 1e6:.0f} MB for all conversations of a replica"
        note(f"{there.url(there.port)}/v1  model '{service.model}', {size}")
        if (there.host, there.port) != (listening.host, port):
            note("the cluster's proxies listen there already; --host and --port do not change that")
        threads = "a core" if scale.cores == 1 else f"{scale.cores:g} cores"
        kept = ", ".join(f"{name} {value}" for name, value in service.cache.items())
        note(f"{kinds} replicas with {threads} each; by default {kept}")
        for line in said:
            note(line)
        if address is not None:
            _of_the_cluster()
            return
        ended.wait()
        note(f"stopping: running answers have {grace:g} s to finish")
        silent = replicas.drain(grace)
    note(f"stopped; replicas that did not answer, and lost what they had not saved: {silent}" if silent else ENDED)


def _of_the_cluster() -> None:
    """Say what a cluster that goes on lacks, and how the replicas are ended."""
    if missing := replicas.lacking():
        own = " ".join(f"{name}={value}" for name, value in missing.items())
        note(f"start the cluster's processes with {own}: docs/replicas.md says what they do")
        if replicas.TOKEN.items() <= missing.items():
            note("the cluster has no token: whoever reaches the ports of its machines can run code there")
    note("the cluster runs them; 'serve shutdown' ends them, and the same command again replaces them")
