"""Workers on the machines of a Ray cluster: tasks that share one job. Ray restarts a failed task, on another machine if
its machine has failed.

Machines share only the installed software. Ray transfers jobs and the contents of data files, and the store is an actor
on the machine that has its file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.models.folders import cache_folder, scratch
from kvkeep_lab.store import ResultFile
from kvkeep_lab.workers import POLL, WorkerJob, packed, unpacked

Files = dict[str, bytes]
"""Contents by path relative to the common folder."""


def work_on_ray(job: WorkerJob, store: ResultFile, address: str, poll: Callable[[], None]) -> None:
    """Run a job's workers as tasks on a cluster, and return when all of them have ended.

    address: address of the cluster; ``auto`` for the cluster of this machine; ``local`` starts a cluster here and ends
    it. ``job.workers`` 0 means one worker per GPU, or per machine without GPUs. Workers share the cores, and the GPUs
    if there are fewer. poll: called at intervals. Raises a worker's error, UsageError if Ray is missing or has too few
    cores, and KvkeepError without a cluster.
    """
    try:
        import ray
        from kvkeep_cluster.ray_cluster import connected
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise UsageError(
            f"--ray needs the package '{error.name}', which is missing: pip install ./connectors/cluster (in a clone "
            "of the repository)."
        ) from error
    files = _contents(job.sources)
    size = sum(map(len, files.values()))
    available = max(os.cpu_count() or 1, job.workers)
    with connected(None if address == "local" else address, available, data=2 * size):
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = 0 if job.device == "cpu" else int(sum(machine.get("GPU", 0) for machine in machines))
        count = job.workers or gpus or len(machines)
        order = packed(ray.cloudpickle.dumps, replace(job, workers=count, sources=()))
        shipped, here = ray.put(files), ray.get_runtime_context().get_node_id()
        actor = ray.remote(ResultFile).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
        )
        task = ray.remote(_work).options(
            max_retries=-1,
            num_cpus=cores([int(machine.get("CPU", 0)) for machine in machines], count),
            num_gpus=1 / math.ceil(count / gpus) if gpus else 0,
            scheduling_strategy="SPREAD",
        )
        keeper = actor.remote(store.path.absolute(), store.start)
        running = [task.remote(order, shipped, keeper, number) for number in range(count)]
        try:
            _wait(running, poll)
        finally:
            for one in running:  # only running tasks: cancelling an ended one may end this process
                ray.cancel(one, force=True)
            ray.kill(keeper)
            store.forget(job.cells)


def _wait(running: list[Any], poll: Callable[[], None]) -> None:
    """Wait for tasks to end, and remove those from ``running``. Raises the error of a task."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    while running:
        ended, running[:] = ray.wait(running, timeout=POLL)
        poll()
        try:
            ray.get(ended)
        except RayError as error:
            cause: BaseException = error
            while isinstance(cause, RayTaskError):  # the store's error is nested in the worker's
                cause = cause.cause
            if isinstance(cause, RayError):
                reason = str(cause).partition("\n")[0].rstrip(".")
                raise KvkeepError(f"Ray failed: {reason}; run the same command again to continue.") from error
            raise cause from None


class _Remote:
    """The store's actor, with the methods of a store."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import ray

        return lambda *given: ray.get(getattr(self._actor, name).remote(*given))


def _work(order: bytes, files: Files, actor: Any, number: int) -> None:
    with scratch(cache_folder() / "lab-data") as folder:
        paths = [folder / name for name in files]
        for path, content in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        store: Any = _Remote(actor)
        replace(unpacked(order), sources=tuple(paths)).work(store, number)


def cores(machines: Sequence[int], count: int) -> int:
    """Return the maximum cores per worker for ``count`` workers on machines with these numbers of cores."""
    for each in range(max(machines, default=0), 0, -1):
        if sum(machine // each for machine in machines) >= count:
            return each
    raise UsageError(f"The Ray cluster has {sum(machines)} cores, too few for {count} workers; give fewer --workers.")


def _contents(sources: Sequence[Path]) -> Files:
    absolute = [path.resolve() for path in sources]
    folder = os.path.commonpath([path.parent for path in absolute]) if absolute else ""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in absolute}
