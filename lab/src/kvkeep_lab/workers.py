"""Workers. Each worker locks a free cell, measures it and appends its record, until no cell is free.

Workers communicate only through the store, so any number of workers and runs may share one store. The workers of this
module are processes on this machine; a process that dies is restarted.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from kvkeep.errors import KvkeepError, UsageError
from kvkeep_lab.cell import Cell
from kvkeep_lab.store import Record, ResultFile

ATTEMPTS = 3
"""Number of workers that may die on a cell before it counts as failed."""

POLL = 0.5
"""Seconds between two reads of the store."""

RunProgress = Callable[[str, int, int], None]
"""Called with the current cell, the finished steps and all steps, without cells that were finished before the run."""

_SPAWN = multiprocessing.get_context("spawn")


class CellRunner(Protocol):
    """Measures cells: a :class:`~kvkeep_lab.runner.Runner`."""

    def measure(self, cell: Cell, step: Callable[[int], None]) -> Record:
        """Measure a cell and return its record. step: receives the number of finished steps."""

    def lost(self, cell: Cell) -> Record:
        """Return the record of a cell that repeatedly killed its process."""


@dataclass(frozen=True)
class WorkerJob:
    """The common settings of the workers of one run."""

    make: Callable[..., CellRunner]
    """Creates a runner from ``sources``, ``device``, ``workers`` and ``notify``."""
    sources: tuple[Path, ...]
    """Source files of the prompts."""
    cells: tuple[Cell, ...]
    steps: int = 1
    """Number of steps of each cell."""
    device: str | None = None
    workers: int = 1
    """Number of workers."""

    def work(
        self,
        store: ResultFile,
        number: int = 0,
        *,
        progress: RunProgress = lambda label, done, total: None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Measure free cells as worker ``number``. Raises the errors of loading a model."""
        runner = self.make(self.sources, device=self.device, workers=self.workers, notify=notify)
        total = len(self.cells) * self.steps
        for place, cell in enumerate(self.order(number)):

            def step(done: int, cell: Cell = cell, before: int = place * self.steps) -> None:
                progress(cell.label, before + done, total)

            step(0)
            begun = store.claim(cell, number)
            try:
                if begun:
                    store.append(runner.measure(cell, step) if begun <= ATTEMPTS else runner.lost(cell))
            finally:
                store.release(number)
            step(self.steps)

    def order(self, number: int) -> Iterator[Cell]:
        """Yield the cells in the order of a worker. Cells with the same prompt form a group. Each worker begins at
        another group, so that its preparation serves the complete group."""
        shared = groupby(self.cells, key=lambda cell: (cell.model, cell.seed, cell.point))
        groups = [list(group) for _, group in shared]
        first = number * len(groups) // self.workers
        for group in groups[first:] + groups[:first]:
            yield from group


def work_in_processes(job: WorkerJob, store: ResultFile, poll: Callable[[], None]) -> None:
    """Run ``job.workers`` worker processes, and return when all of them have ended.

    Workers share the cores, unless OMP_NUM_THREADS sets the threads of each. They use the GPUs in turn, unless the job
    has a device. poll: called at intervals. Raises a worker's error, UsageError for a job that cannot be pickled, and
    KvkeepError if a process cannot start.
    """
    orders = [packed(pickle.dumps, replace(job, device=device)) for device in devices(job.device, job.workers)]
    running: list[_Worker] = []
    try:
        for number, order in enumerate(orders):
            _start(running, order, number, store)
        while running:
            wait([worker.process.sentinel for worker in running], POLL)
            poll()
            for worker in [worker for worker in running if not worker.process.is_alive()]:
                running.remove(worker)
                if worker.died():
                    _start(running, worker.order, worker.number, store)
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()
        store.forget(job.cells)


def devices(device: str | None, count: int) -> list[str | None]:
    """Return the device of each worker."""
    import torch

    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    return [f"cuda:{number % gpus}" if gpus else device for number in range(count)]


def packed(dumps: Callable[[Any], bytes], job: WorkerJob) -> bytes:
    """Return a job as bytes for another process. Raises UsageError if it cannot be pickled."""
    try:
        return dumps(job)
    except Exception as error:  # pickling raises errors of every kind
        raise _not_importable(error) from error


def unpacked(order: bytes) -> WorkerJob:
    """Return the job. Raises UsageError if it contains something that this process cannot import."""
    try:
        job: WorkerJob = pickle.loads(order)
        return job
    except Exception as error:  # importing a user's module may raise anything
        raise _not_importable(error) from error


def _start(running: list[_Worker], order: bytes, number: int, store: ResultFile) -> None:
    """Start a worker. Ctrl-C is blocked until the worker is in ``running``, and permanently in its process: the parent
    ends it."""
    before = None
    if hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # its start unblocks the signal
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        running.append(_Worker(order, number, store))
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """A process and its messages: None when it begins, and the error that ended it."""

    def __init__(self, order: bytes, number: int, store: ResultFile) -> None:
        self.order, self.number = order, number
        self._messages, sending = _SPAWN.Pipe(duplex=False)
        self.process = _SPAWN.Process(target=_work, args=(sending, order, number, store.path, store.start))
        self.process.start()
        sending.close()

    def died(self) -> bool:
        """Return whether the process was killed while it worked, by a signal or for lack of memory. Raises the error
        that it sent, and KvkeepError if it did not begin."""
        self.process.join()
        sent: list[KvkeepError | None] = []
        with suppress(EOFError):
            while True:
                sent.append(self._messages.recv())
        if sent and sent[-1] is not None:
            raise sent[-1]
        if not sent:
            raise KvkeepError(
                "A worker could not be started. Workers import the script that starts them, so save the script "
                "as a file and measure only within \"if __name__ == '__main__':\"."
            )
        return self.process.exitcode != 0


def _work(messages: Connection, order: bytes, number: int, path: Path, start: int) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        job = unpacked(order)
        if "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.workers))
        messages.send(None)
        job.work(ResultFile(path, start), number)
    except KvkeepError as error:
        messages.send(error)
    except Exception as error:  # the error may not be picklable
        messages.send(KvkeepError(f"A worker failed ({type(error).__name__}: {error})."))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _not_importable(error: Exception) -> UsageError:
    return UsageError(
        f"A worker cannot import what is to be measured ({type(error).__name__}: {error}); put a task of your own into "
        "a module that workers can import, or measure with one worker."
    )
