"""The options of ``kvkeep serve`` for several processes, and for a store in a bucket. Nothing here imports torch or
Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvkeep.cli.serve.server_options import LimitOptions, MemoryOptions, NetworkOptions, ProcessOptions, StoreOptions
from kvkeep.errors import UsageError

if TYPE_CHECKING:
    from kvkeep.cli.serve.address import Address
    from kvkeep.serve.service import Service


@dataclass(frozen=True)
class ClusterOptions(ProcessOptions):
    """The number and place of server processes, and the bucket of the store."""

    replicas: Annotated[
        str | None,
        Option(
            metavar="N",
            help="Number of processes that Ray Serve runs, each with --memory; with MIN:MAX Ray Serve adds and removes "
            "them as needed.",
            show_default="this process only",
        ),
    ] = None
    bucket: Annotated[
        str | None, Option(metavar="URL", help="Bucket that several servers share (s3://BUCKET/PREFIX).")
    ] = None
    ray: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            help="Ray cluster for --replicas, which keeps running them; auto: the cluster of this machine.",
            show_default="a cluster that starts and ends with this command",
        ),
    ] = None
    cores: Annotated[
        float | None, Option(min=0.1, help="CPU cores of each replica.", show_default="an equal share, or 1 with --ray")
    ] = None

    def check(self, memory: MemoryOptions, network: NetworkOptions, limits: LimitOptions, store: StoreOptions) -> None:
        """Raise UsageError for incompatible options."""
        if self.bucket is not None:
            if store.private:
                raise UsageError("--private keeps conversations in memory only; leave it or --bucket out.")
            if store.sessions is None:
                raise UsageError("--bucket keeps copies of blocks in a folder of its own; name one with --sessions.")
        for name in ("ray", "cores"):
            if self.replicas is None and getattr(self, name) is not None:
                raise UsageError(f"--{name} is used with --replicas only; leave it out, or give --replicas.")
        if self.ray is None:
            return
        if network.port == 0:
            raise UsageError("With --ray every machine of the cluster listens on the same port; give one with --port.")
        if limits.grace is not None:
            raise UsageError(
                "With --ray the command ends at once and the cluster keeps serving; leave --grace out, or limit "
                "answers with --time."
            )
        needed = {"--memory": memory.memory, "--method or --budget": memory.cache(), "--sessions": store.sessions}
        if missing := [name for name, value in needed.items() if not value]:
            raise UsageError(
                f"With --ray give {' and '.join(missing)}: machines differ in memory, and conversations must be in "
                "a folder that all of them share."
            )

    def service(self, given: Mapping[str, Any], cache: Mapping[str, Any], keys: Sequence[str]) -> Service:
        """Return the options of a process. A single one without a bucket keeps the locks of its sessions."""
        if self.replicas is None and self.bucket is None:
            return super().service(given, cache, keys)
        from kvkeep_cluster.service import ClusterService

        return ClusterService.parse({**given, "bucket": self.bucket}, cache, keys)

    def serve(
        self, service: Service, conversations: int, address: Address, grace: float, saved: str, access: str
    ) -> None:
        """Run the replicas."""
        from kvkeep_cluster.replicas import Scale
        from kvkeep_cluster.serve import serve_replicas
        from kvkeep_cluster.service import ClusterService

        assert self.replicas is not None and isinstance(service, ClusterService)
        if self.ray is None:
            service.store()  # its errors come before Ray is started
        elif not service.keys:
            access = "no API key: anyone who reaches a proxy can use it"
        share = max(1, (os.cpu_count() or 1) // Scale.parse(self.replicas, 1, 1).maximum)
        scale = Scale.parse(self.replicas, self.cores or (share if self.ray is None else 1), conversations)
        serve_replicas(service, scale, self.ray, address, grace, saved, access)
