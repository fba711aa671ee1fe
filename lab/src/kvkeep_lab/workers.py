"""Workers: processes that measure cells beside each other, and who of them gets which cell.

A worker measures one cell at a time. One that dies loses the cell in hand, which is given out again, and starts anew.
Results come back to the process that gave the cells out; workers write nothing and know of no store.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep.errors import KvkeepError, UsageError

if TYPE_CHECKING:
    from kvkeep_lab.experiment import Cell
    from kvkeep_lab.store import Record

ATTEMPTS = 3
"""How many workers may die of a cell before it counts as failed."""

_SPAWN = multiprocessing.get_context("spawn")


class Died(Exception):
    """A worker's process ended before it answered."""


class Desk(Protocol):
    """Where a worker measures."""

    def measure(self, cell: Cell, step: Callable[[int], None] = ..., /) -> Record:
        """Measure one cell; ``step`` gets the samples done."""


class Worker(Protocol):
    """One who measures a cell at a time."""

    def start(self) -> Future[Any]:
        """Begin, or begin anew after a death; cells may be given when the future is done."""

    def measure(self, cell: Cell) -> Future[Any]:
        """Measure a cell."""

    def result(self, future: Future[Any]) -> Any:
        """Return what came of a future that is done; raises Died, or what was raised over there."""


class Here:
    """The one worker who is this very process. step: gets the cell and its samples done."""

    def __init__(self, desk: Desk, step: Callable[[Cell, int], None]) -> None:
        self._desk = desk
        self._step = step

    def start(self) -> Future[Any]:
        """There is nothing to wait for."""
        return _done(None)

    def measure(self, cell: Cell) -> Future[Any]:
        """Return when it is measured."""
        return _done(self._desk.measure(cell, partial(self._step, cell)))

    def result(self, future: Future[Any]) -> Any:
        """Return the row."""
        return future.result()


class LocalWorker:
    """A process of its own on this machine: a pool of one, so that a death is known to be this one's.

    order: see :func:`packed`. threads: what torch is given, None leaves it at OMP_NUM_THREADS.
    """

    def __init__(self, order: bytes, threads: int | None) -> None:
        self._order = order
        self._threads = threads
        self._pool: ProcessPoolExecutor | None = None

    def start(self) -> Future[Any]:
        """Start a process, and open a desk there."""
        self._pool = ProcessPoolExecutor(1, _SPAWN)
        with _interrupts_held():
            self._process = self._pool.submit(_open, self._order, self._threads)
        return self._process

    def measure(self, cell: Cell) -> Future[Any]:
        """Send it a cell."""
        assert self._pool is not None
        try:
            return self._pool.submit(_measure, cell)
        except BrokenProcessPool as error:  # it died while it had nothing to do
            return _done(error)

    def result(self, future: Future[Any]) -> Any:
        """Return what it answered; raises Died."""
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise Died("its process was ended from outside, or for want of memory") from error

    def close(self) -> None:
        """End the process, whatever it is at."""
        if self._pool is None:
            return
        if self._process.done() and self._process.exception() is None:
            for child in multiprocessing.active_children():
                if child.pid == self._process.result():
                    child.kill()
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def local_workers(make: Callable[..., Desk], device: str | None, count: int) -> Iterator[list[LocalWorker]]:
    """Yield ``count`` workers, and end them afterwards.

    They share the cores, unless OMP_NUM_THREADS says how many threads each has, and the GPUs in turn, unless ``device``
    names one. make: gets ``device`` and ``workers``, the count. Raises UsageError for what cannot be sent to another
    process.
    """
    import torch

    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    devices = [f"cuda:{number % gpus}" if gpus else device for number in range(count)]
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // count)
    with ExitStack() as ending:
        orders = [packed(pickle.dumps, partial(make, device=one, workers=count)) for one in devices]
        workers = [LocalWorker(order, threads) for order in orders]
        for worker in workers:
            ending.callback(worker.close)
        yield workers


class Queue:
    """Cells that wait. Those that share a model, a seed and a point are a group, which one worker goes through, for
    what it prepared for one of them serves the next; when all groups are taken, who has none gets half of the rest of
    the longest."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        shared = groupby(cells, key=lambda cell: (cell.model, cell.seed, cell.point))
        self._groups = deque(deque(group) for _, group in shared)
        self._shares: dict[Worker, deque[Cell]] = {}

    def __bool__(self) -> bool:
        return bool(self._groups) or any(self._shares.values())

    def take(self, worker: Worker) -> Cell | None:
        """Return the next cell for ``worker``; None where there is none left."""
        if not self._shares.get(worker):
            self._shares[worker] = self._groups.popleft() if self._groups else self._half()
        return self._shares[worker].popleft() if self._shares[worker] else None

    def put_back(self, cell: Cell) -> None:
        """Let a cell wait again, after all others."""
        self._groups.append(deque([cell]))

    def _half(self) -> deque[Cell]:
        longest = max(self._shares.values(), key=len, default=deque[Any]())
        return deque(reversed([longest.pop() for _ in range((len(longest) + 1) // 2)]))


@dataclass
class _Job:
    """What a worker is at: a cell, whose claim is held until ``claimed`` is closed, or starting."""

    worker: Worker
    cell: Cell | None = None
    claimed: ExitStack = field(default_factory=ExitStack)


def measured(
    workers: Sequence[Worker],
    cells: Sequence[Cell],
    claim: Callable[[Cell], AbstractContextManager[bool]],
    lost: Callable[[Cell], Record],
) -> Generator[tuple[Cell, Record | None], None, None]:
    """Yield every cell with its row as it comes, and with None where it is not ours to measure.

    claim: entered before a cell is given out, tells whether it is ours, and is left when the caller goes on after it.
    lost: makes the row of a cell that :data:`ATTEMPTS` workers died of. What a worker raises is raised, and KvkeepError
    where none can be started.
    """
    queue, deaths = Queue(cells), Counter[str]()
    jobs: dict[Future[Any], _Job] = {worker.start(): _Job(worker) for worker in workers[: len(cells)]}
    try:
        while queue or any(job.cell for job in jobs.values()):
            for future in wait(jobs, return_when=FIRST_COMPLETED).done:
                job = jobs.pop(future)
                with job.claimed:
                    try:
                        row = job.worker.result(future)
                    except Died as death:
                        if job.cell is not None:
                            jobs[job.worker.start()] = _Job(job.worker)
                            deaths[job.cell.key] += 1
                            if deaths[job.cell.key] < ATTEMPTS:
                                queue.put_back(job.cell)
                            else:
                                yield job.cell, lost(job.cell)
                        elif not jobs:
                            raise _none_started(death) from death
                        continue
                    if job.cell is not None:
                        yield job.cell, row
                while (cell := queue.take(job.worker)) is not None:
                    with ExitStack() as claimed:
                        if claimed.enter_context(claim(cell)):
                            jobs[job.worker.measure(cell)] = _Job(job.worker, cell, claimed.pop_all())
                            break
                        yield cell, None
    finally:
        for job in jobs.values():
            job.claimed.close()


def packed(dumps: Callable[[Any], bytes], make: Callable[..., Desk]) -> bytes:
    """Return an order: what makes a desk, as bytes for another process; raises UsageError where that cannot be."""
    try:
        return dumps(make)
    except Exception as error:  # pickling raises of every kind
        raise _not_over_there(error) from error


def unpacked(order: bytes) -> Callable[..., Desk]:
    """Return what makes a desk; raises UsageError where it is made of what this process does not have."""
    try:
        return pickle.loads(order)
    except Exception as error:  # whatever importing somebody's module raises
        raise _not_over_there(error) from error


_desk: Desk  # of this process, where it is a worker


def _open(order: bytes, threads: int | None) -> int:
    global _desk
    Thread(target=_leave_with_parent, daemon=True).start()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    _desk = unpacked(order)()
    return os.getpid()


def _measure(cell: Cell) -> Record:
    return _desk.measure(cell)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # nobody is left to tell


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back within the block; processes started there never get one: their driver ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def _none_started(death: Died) -> KvkeepError:
    return KvkeepError(
        f"No worker could be started: {death}. Workers import the script that starts them, so it has to be a file, and "
        "to measure only within \"if __name__ == '__main__':\"."
    )


def _not_over_there(error: Exception) -> UsageError:
    return UsageError(
        f"A worker cannot have what is to be measured ({type(error).__name__}: {error}); put a task of your own into a "
        "module that workers can import, or measure with one worker."
    )
