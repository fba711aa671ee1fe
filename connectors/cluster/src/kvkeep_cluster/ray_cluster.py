"""A Ray cluster within a block: one that is there, or one of this machine that is started and ends with the block.

This module alone calls ``ray.init``.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.files import dead, owner
from kvkeep.plugins import first_line

OBJECT_STORE_BYTES = 100 * 2**20
"""Bytes of the object store of a Ray started here; Ray needs at least 75 MiB."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # otherwise Ray lowers the workers' priority
}
CONNECT_TIMEOUT_S = 5.0
"""Seconds in which the machine at an address has to answer; Ray itself tries for minutes."""
_CLIENT_PORT = 10001
"""The default port of ``ray://HOST``."""


class ClusterEnded(KvkeepError):
    """The cluster's processes have ended before this one."""


@contextmanager
def connected(
    address: str | None, cores: int, *, data: int = 0, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """Be the driver of a cluster within the block: of the one that this process is the driver of already, if there is
    any.

    address: the cluster's, ``auto`` for the one that this machine is part of; None starts one here with ``cores``
    cores, ``environment``, and room for ``data`` bytes. Raises UsageError for an invalid address, and KvkeepError where
    there is no cluster. The block raises ClusterEnded when :func:`alive` is false. It then does not shut Ray down: Ray
    would wait a minute and end this process.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    settings: dict[str, Any] = {}
    with ExitStack() as ending:
        if address is None:
            os.environ.update(environment)
            # Without a token, Ray writes one to the user's home folder.
            for name, value in {**_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
                os.environ.setdefault(name, value)
            settings = {"num_cpus": cores, "_temp_dir": ending.enter_context(_folder())}
            settings |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES + data}
        ending.push(_shutdown)
        try:
            if address is not None:
                _reach(address)
            ray.init("local" if address is None else address, log_to_driver=False, logging_level="error", **settings)
        except UsageError:
            raise
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            what = (
                "No Ray cluster can be started here" if address is None else f"There is no Ray cluster at '{address}'"
            )
            system = isinstance(error, OSError) and error.strerror
            raise KvkeepError(f"{what}: {system.lower() + '.' if system else first_line(error)}") from error
        yield


def alive() -> bool:
    """Return whether the cluster that this process is the driver of answers."""
    import ray

    try:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _shutdown(kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
    import ray

    if isinstance(error, ClusterEnded):
        atexit.unregister(ray.shutdown)
    else:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError unless something answers at an address, and UsageError for what names no cluster."""
    where = os.environ.get("RAY_ADDRESS") or None if address == "auto" else address
    if where is None:
        return  # Ray searches the processes of this machine
    if where in ("", "local"):
        raise UsageError(
            f"'{where}' is not an address of a Ray cluster: give HOST:PORT, or auto for this machine's own."
        )
    parts = urlsplit(where if "://" in where else f"//{where}")
    port = parts.port or (_CLIENT_PORT if parts.scheme == "ray" else None)
    if parts.hostname is not None and port is not None:  # otherwise Ray reports the error
        socket.create_connection((parts.hostname, port), CONNECT_TIMEOUT_S).close()


@contextmanager
def _folder() -> Iterator[str]:
    """Have a folder for the files of a cluster within the block. Those of killed processes are removed, too."""
    parent = Path("/tmp" if os.path.isdir("/tmp") else gettempdir())  # paths of sockets have to be short
    for left in parent.glob("kvkeep-*/owner"):
        with suppress(OSError, ValueError):
            if left.is_file() and dead(left.read_text(encoding="utf-8")):
                shutil.rmtree(left.parent, ignore_errors=True)
    with TemporaryDirectory(prefix="kvkeep-", dir=parent, ignore_cleanup_errors=True) as folder:
        (Path(folder) / "owner").write_text(owner(), encoding="utf-8")
        yield folder
