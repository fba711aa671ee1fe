"""A Ray cluster within a block: one that is there, or one of this machine that is started and ends with the block.

This module alone calls ``ray.init``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from kvkeep.errors import KvkeepError
from kvkeep.extras import optional
from kvkeep.plugins import first_line

OBJECTS = 100 * 2**20
"""Bytes of Ray's own object store, where it is started here; it wants 75 MiB."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else anything else on the machine comes first
}


@contextmanager
def connected(
    address: str | None, cores: int, *, data: int = 0, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Be the driver of a cluster within the block: of the one that this process is the driver of already, if there is
    any.

    address: of the cluster, ``auto`` for the one that this machine is part of; None starts one here with so many
    ``cores``, room for so many bytes of ``data``, and this ``environment``. Raises UsageError where Ray is missing,
    KvkeepError where there is no cluster.
    """
    ray = optional("ray", "ray")
    if ray.is_initialized():
        yield
        return
    own: dict[str, Any] = {}
    with ExitStack() as ending:
        if address is None:
            os.environ.update(environment)
            # Without a token Ray puts one into the user's home.
            for name, value in {**_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
                os.environ.setdefault(name, value)
            short = "/tmp" if os.path.isdir("/tmp") else None  # paths of sockets have to be short
            folder = TemporaryDirectory(prefix="kvkeep-", dir=short, ignore_cleanup_errors=True)
            own = {"num_cpus": cores, "_temp_dir": ending.enter_context(folder)}
            own |= {"include_dashboard": False, "object_store_memory": OBJECTS + data}
        ending.callback(ray.shutdown)
        try:
            ray.init(address or "local", log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
            what = (
                "No Ray cluster can be started here" if address is None else f"There is no Ray cluster at '{address}'"
            )
            raise KvkeepError(f"{what}: {first_line(error)}") from error
        yield
