"""Workers on the machines of a Ray cluster.

They share nothing but the software: orders and the contents of data files travel with Ray, and so do results. A worker
that dies is restarted by Ray, on another machine where its own is gone.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.models.folders import cache_folder
from kvkeep.models.scratch import scratch
from kvkeep_lab.workers import Desk, Died, packed, unpacked

if TYPE_CHECKING:
    from kvkeep_lab.experiment import Cell
    from kvkeep_lab.store import Record

Files = dict[str, bytes]
"""Contents by path, within the folder that all of them lie in."""

_STORE = 100 * 2**20  # bytes of Ray's own object store, where it is started here; it wants 75 MiB


class Station:
    """The actor: a desk on some machine."""

    def open(self, order: bytes, files: Files) -> None:
        """Open a desk for data that are laid into this machine's cache folder, unless they are there."""
        folder = _laid(files)
        self._desk: Desk = unpacked(order)([folder / name for name in files])

    def measure(self, cell: Cell) -> Record:
        """Measure a cell."""
        return self._desk.measure(cell)


class RayWorker:
    """An actor, seen from the driver. order: what ``Station.open`` gets."""

    def __init__(self, actor: Any, *order: Any) -> None:
        self._actor = actor
        self._order = order

    def start(self) -> Future[Any]:
        """Open a desk there, as soon as there is a process."""
        return self._actor.open.options(max_task_retries=-1).remote(*self._order).future()

    def measure(self, cell: Cell) -> Future[Any]:
        """Send it a cell."""
        return self._actor.measure.remote(cell).future()

    def result(self, future: Future[Any]) -> Any:
        """Return what it answered; raises Died."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return future.result()
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise Died(str(error).partition("\n")[0].rstrip(".")) from error


@contextmanager
def ray_workers(
    make: Callable[..., Desk], sources: Sequence[Path], device: str | None, address: str, count: int | None
) -> Iterator[list[RayWorker]]:
    """Yield workers on a cluster, and end them afterwards.

    make: gets the data files, as paths where it runs, ``device``, and ``workers``, how many there are. address: of the
    cluster, ``auto`` for the one that this machine is part of, ``local`` starts one here and ends it. count: None is
    one for each GPU or, where there are none, for each machine. Workers share the cores, and the GPUs where those are
    fewer. Raises UsageError where Ray is missing or has too few cores, KvkeepError where there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs the package 'ray', which is missing: pip install 'kvkeep[ray]'.") from error
    files = _contents(sources)
    with nullcontext() if ray.is_initialized() else _connected(address, count, _STORE + 2 * _size(files)):
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = 0 if device == "cpu" else int(sum(machine.get("GPU", 0) for machine in machines))
        count = count or gpus or len(machines)
        order, shipped = packed(ray.cloudpickle.dumps, partial(make, device=device, workers=count)), ray.put(files)
        station = ray.remote(Station).options(
            max_restarts=-1,
            num_cpus=_cores([int(machine.get("CPU", 0)) for machine in machines], count),
            num_gpus=1 / math.ceil(count / gpus) if gpus else 0,
            scheduling_strategy="SPREAD",
        )
        actors = [station.remote() for _ in range(count)]
        try:
            yield [RayWorker(actor, order, shipped) for actor in actors]
        finally:
            for actor in actors:
                ray.kill(actor)


@contextmanager
def _connected(address: str, count: int | None, store: int) -> Iterator[None]:
    """Be the driver of a cluster within the block. store: bytes of the objects of one that is started here."""
    import ray

    own: dict[str, Any] = {}
    with ExitStack() as ending:
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what is started here tells nobody
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray puts one into the user's home
            short = "/tmp" if os.path.isdir("/tmp") else None  # sockets lie there, and their paths have to be short
            folder = TemporaryDirectory(prefix="kvkeep-", dir=short, ignore_cleanup_errors=True)
            own = {"num_cpus": max(os.cpu_count() or 1, count or 1), "_temp_dir": ending.enter_context(folder)}
            own |= {"include_dashboard": False, "object_store_memory": store}
        ending.callback(ray.shutdown)
        try:
            ray.init(address, log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, ValueError) as error:
            raise KvkeepError(f"There is no Ray cluster at '{address}': {str(error).splitlines()[0]}") from error
        yield


def _cores(machines: Sequence[int], count: int) -> int:
    """Return the most cores that each of ``count`` workers can have on machines with so many."""
    for cores in range(max(machines, default=0), 0, -1):
        if sum(machine // cores for machine in machines) >= count:
            return cores
    raise UsageError(f"The Ray cluster has {sum(machines)} cores, too few for {count} workers; take fewer (--workers).")


def _contents(sources: Sequence[Path]) -> Files:
    absolute = [path.resolve() for path in sources]
    folder = os.path.commonpath([path.parent for path in absolute]) if absolute else ""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in absolute}


def _size(files: Files) -> int:
    return sum(map(len, files.values()))


def _laid(files: Files) -> Path:
    """Return the folder with these files, making it where there is none."""
    known = hashlib.sha256()
    for name, content in files.items():
        known.update(f"{name}\0".encode() + hashlib.sha256(content).digest())
    folder = cache_folder() / "lab-data" / known.hexdigest()[:16]
    if not folder.exists():
        with scratch(folder.parent) as fresh:
            for name, content in files.items():
                path = fresh / "data" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            (fresh / "data").mkdir(exist_ok=True)
            try:
                os.rename(fresh / "data", folder)
            except OSError:
                if not folder.exists():  # else a worker beside this one was first
                    raise
    return folder
