"""The engine: a thread around a scheduler (:mod:`kvkeep.engine.answer`), with admission and a store.

The thread owns the model, and every session its cache. With the same sampling, an answer has the tokens of
:func:`kvkeep.generate`, independent of other sessions. An answer of a named session ends after its turn is saved; of
other sessions, blocks are stored after their answers (:mod:`~kvkeep.serve.session_storage`).

**Faults.** If a session's cache, sampling or listener raises, its answer ends with an error, and the session
continues from its last complete step. If a packed pass raises a RuntimeError of torch, the answers in it end; if it
runs out of memory, those end that cannot be read in a pass of their own. If memory runs out outside of a pass, all
running answers end. Any other error ends the thread, and with it the server's process: a lost device
(``torch.AcceleratorError``), other errors of the model in a packed pass, and errors of the engine itself.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from kvkeep.blocks.store import Store
from kvkeep.cache import KeepCache
from kvkeep.engine.answer import Answer, Ask, Scheduler, end_ids
from kvkeep.errors import (
    EngineStopping,
    KvkeepError,
    PromptTooLong,
    UnsupportedModelError,
    UsageError,
    place_of,
    ran_out_of_memory,
    release,
)
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import processes
from kvkeep.models.binding import bind
from kvkeep.models.loading import Loaded
from kvkeep.native.library import trim_memory
from kvkeep.native.threads import limit_threads
from kvkeep.policies.endless import endless_options
from kvkeep.policies.methods import Request
from kvkeep.serve.admission import Admission, Arbiter
from kvkeep.serve.session import Event, Finished, Job, Name, State, check_name, total_bytes
from kvkeep.serve.session_pool import EVICTION_INTERVAL_S, SessionPool

log = logging.getLogger(__name__)

T = TypeVar("T")
WAITING = 64
"""The maximum number of requests that wait for memory or for another answer."""
ROOM_BYTES = 32 << 20
"""The memory that the process can still get when a step begins, and when a request is read: parsing a body of the
largest size takes no more. Libraries end the process where small allocations fail."""


def _bind(model: Any, geometry: ModelGeometry) -> None:
    """Bind a model before threads use it, because concurrent binding is not safe. Raises UnsupportedModelError."""
    if processes(model) > 1:
        raise UnsupportedModelError(
            "This model is split over several processes (tensor parallelism), which the server does not support; load "
            "the model in one process."
        )
    try:
        bind(model)
    except UnsupportedModelError:
        if not geometry.other_layers:  # these layers need a separate pass per session
            raise


class Engine:
    """Answers many sessions within ``memory`` bytes.

    store: the store of sessions and beginnings; without one, evicted sessions are forgotten and read again. cache:
    default method, budget and options of a session. waiting: the maximum number of waiting requests. capacity: maximum
    number of older entries that a session of ``endless`` stores (None: no limit). pool: the class that holds sessions
    in memory. Call :meth:`start` for a thread; or call :meth:`step` until it returns False, then :meth:`close`. Raises
    UnsupportedModelError for a model whose attention cannot be streamed, and UsageError for a capacity that is too
    small for sessions that continue the default one.
    """

    def __init__(
        self,
        loaded: Loaded,
        memory: int,
        waiting: int = WAITING,
        store: Store | None = None,
        capacity: int | None = None,
        pool: type[SessionPool] = SessionPool,
        **cache: Any,
    ) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.cache, self.capacity = cache, capacity
        self.arbiter = Arbiter(memory)
        self.geometry = ModelGeometry.of(self.model)
        _bind(self.model, self.geometry)
        if capacity is not None:  # a capacity that is too small is refused here
            KeepCache(self.model, **self.options(endless_options(cache, self.geometry)))
        self._inbox: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self.sessions = pool(self.model, self.tokenizer, store, lambda: self._inbox.put(None))
        self.scheduler = Scheduler(self.model)
        self.running: list[Job] = []
        self._saving: dict[Job, Event] = {}  # answers whose turn is being saved, and their last events
        self._admission = Admission(self.model, self.arbiter, self.sessions, self.running, self._saving, waiting)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.stopping = self._ended = False
        self.fault: BaseException | None = None  # the error that ended its thread
        self.beat = time.monotonic()
        self.ends = end_ids(self.model)

    # -- from any thread ------------------------------------------------------------------------------

    def submit(
        self,
        ask: Ask,
        listener: Callable[[Event], None],
        *,
        name: Name | None = None,
        owner: str = "",
        names_cache: bool | None = None,
        **cache: Any,
    ) -> Job:
        """Request an answer; the engine's thread calls ``listener`` with each event. name: owner and name of the
        session to continue. owner: the owner of an unnamed session; an owner's sessions share prefixes. cache: method,
        budget and options of a :class:`~kvkeep.cache.KeepCache` for a new session; default: the engine's. names_cache:
        whether a session that exists has to have these options; by default, if there are any. Raises QueueFull,
        EngineStopping, or UsageError for a request that can never be answered."""
        positions = self.positions(cache)
        if not ask.prompt:
            raise UsageError("The prompt is empty; send at least one token.")
        if positions is not None and len(ask.prompt) >= positions:
            raise PromptTooLong.of(len(ask.prompt), positions)
        if name is not None:
            check_name(name)
        named = bool(cache) if names_cache is None else names_cache
        job = Job(ask, listener, name, owner if name is None else name[0], self.options(cache), named)
        with self._lock:
            if self.stopping:
                raise EngineStopping("The server is shutting down; retry when it is back.")
            self._admission.enter()  # here, because a step may take seconds, in which the inbox fills
            self._inbox.put(job)
        return job

    def options(self, cache: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a new session for those of a request (default: the engine's), with the engine's
        capacity if its method is ``endless``."""
        chosen = cache or self.cache
        if self.capacity is None or not Request.parse(**chosen).method.recall.endless:
            return chosen
        return {**chosen, "capacity": self.capacity}

    def positions(self, cache: Mapping[str, Any]) -> int | None:
        """Return the maximum number of tokens of a session with these options (default: the engine's); None: no limit.
        Raises UsageError or BudgetError for options that are wrong for every model."""
        any_length = Request.parse(**(cache or self.cache)).method.any_length
        return None if any_length else self.geometry.max_positions

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` in the engine's thread between two steps; the future has its result or exception. It must be
        short, because all sessions wait for it. Raises EngineStopping after the end."""
        future: Future[T] = Future()

        def done() -> None:
            if future.set_running_or_notify_cancel():  # else the caller has cancelled it
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

        with self._lock:
            if self._ended:
                raise EngineStopping("The engine has ended.")
            self._inbox.put(done)
        return future

    @property
    def waiting(self) -> int:
        """The number of requests whose answers have not begun."""
        return self._admission.count

    def start(self) -> None:
        """Run steps in a new thread."""
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)
        self._thread.start()

    def stop(self, grace: float = 10.0) -> None:
        """Refuse new requests, give running answers and their storing ``grace`` seconds to finish, cancel the rest; end
        the thread. What was not stored is read again."""
        with self._lock:
            self.stopping = True
        self._inbox.put(None)
        deadline = time.monotonic() + grace
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.05)
            if time.monotonic() > deadline:
                self.sessions.beginnings.ending = True
                for job in [*self.running, *self._admission.waiting]:
                    job.cancel()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close all sessions, after the last step."""
        self.sessions.close()

    def _run(self) -> None:
        try:
            limit_threads()
            while self._survived_step():
                pass
        except BaseException as error:
            self.fault = error
            with self._lock:
                self.stopping = True
            self._take_in(False)
            for job in [*self.running, *self._admission.waiting]:
                job.tell(KvkeepError(f"The engine failed ({type(error).__name__}); the answer is lost."))
            log.error("The engine failed: %s", place_of(error))
        finally:
            with self._lock:
                self._ended = True
            self._take_in(False)  # fails the waiting requests
            try:
                self.close()
            finally:
                self._report_saved()

    # -- in the engine's thread -----------------------------------------------------------------------

    def _survived_step(self) -> bool:
        """Take a step. If memory runs out outside of any answer, end all running ones: some may have read tokens that
        they do not know of."""
        try:
            return self.step(wait=True)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            release(error)
            trim_memory()
            for job in self._answered:
                self._end_anyway(job, job.failure(error))
            return True

    @property
    def _answered(self) -> list[Job]:
        """The running jobs whose answers have begun."""
        return [job for job in self.running if job.answer is not None]

    def _end_anyway(self, job: Job, error: KvkeepError) -> None:
        """End a failed job. If memory runs out again meanwhile, nothing of its session is kept."""
        try:
            self._end(job, error)
        except Exception as again:
            if not ran_out_of_memory(again):
                raise
            if job in self.running:  # else it has ended, or is being saved
                self.running.remove(job)
                assert job.session is not None
                job.session.past.cache.reset()
                self._leave(job, error, stay=False)

    @property
    def granted(self) -> int:
        """Bytes that are granted to running answers, which contain those that their caches use."""
        return total_bytes((job.granted, job.session.counted[1]) for job in self.running if job.session is not None)

    def step(self, wait: bool = False) -> bool:
        """Take requests from the inbox, and run one read of every answer. wait: if there is no work, wait for some.
        Return False if the engine was stopped and no work is left."""
        self._take_in(wait and not self._work)
        self._report_saved()
        self.sessions.leave_stored()
        self._admission.drop_cancelled()
        for job in self._answered:
            if job.cancelled:
                self._end(job, "cancelled")
        self.sessions.evict()
        self.sessions.trim_memory()
        self._admission.admit()
        if not self._admission.waiting:  # a job that waits for memory may have ended the storing to get it
            self.sessions.resume_storing()
        self._begin_answers()
        self.beat = time.monotonic()
        if self.scheduler.answers:
            self._read()
        elif self.sessions.storage.busy:  # all answers wait for the store
            self._take_in(True)
        stopping = self.stopping  # read first: no request is accepted afterwards
        return self._work or not self._inbox.empty() or not stopping

    @property
    def _work(self) -> bool:
        """Whether an answer is not complete, or not stored."""
        return bool(self.running or self._admission.waiting or self._saving or self.sessions.storing)

    def _take_in(self, wait: bool) -> None:
        while True:
            try:
                given = self._inbox.get(block=wait, timeout=EVICTION_INTERVAL_S)
            except queue.Empty:
                return
            wait = False
            if isinstance(given, Job):
                self._admission.waiting.append(given)
            elif given is not None:
                given()

    def _begin_answers(self) -> None:
        """Begin the answers whose sessions are in memory."""
        for job in [job for job in self.running if job.answer is None]:
            session = job.session
            assert session is not None
            if session.working:
                continue
            try:
                if session.work is not None:
                    session.work.result()
                    session.past.align(job.ask.prompt, job.cache.get("pin"))
                session.work, session.state = None, State.ANSWERING
                self.sessions.beginnings.watch(session, job.ask.prompt, self.ends)
                answer = Answer(job.ask, session.cache, self.tokenizer, self.ends, job.tell)
                job.scheduled, job.read = self.scheduler.add(answer), answer.known
            except Exception as error:
                self.running.remove(job)
                self._leave(job, job.failure(error), stay=False)

    def _read(self) -> None:
        """Run a step of the scheduler, and pass each answer its result. If the process has next to no memory left, end
        the answer that began last."""
        if not self.sessions.make_room(ROOM_BYTES) and (answered := self._answered):
            self._end(answered[-1], answered[-1].failure(MemoryError("less than the engine keeps free")))
        jobs = {job.scheduled: job for job in self.running}
        results = self.scheduler.step()
        tokens = sum(len(result.read.ids) for result in results)
        self.sessions.released_bytes += tokens * self.geometry.kv_bytes_per_token  # a buffer that grows is copied
        for result in results:
            job, answer = jobs[result.scheduled], result.scheduled.answer
            job.read = min(answer.cache.get_seq_length(), len(job.ask.prompt))
            try:
                complete = result.scheduled.give(result.logits)
            except Exception as error:
                self._end(job, job.failure(error))
            else:
                if complete:
                    self._end(job, "stop" if answer.reason == "eos" else answer.reason)

    def _end(self, job: Job, reason: str | KvkeepError) -> None:
        """End an answer, and restore its session to the last complete step as far as possible. reason: why it ends, or
        the error that it failed with."""
        answer = job.halt(self.scheduler)
        self.running.remove(job)  # afterwards: a job in neither list would never end
        self._save(job, reason if isinstance(reason, KvkeepError) else job.finished(answer, reason))

    def _save(self, job: Job, last: Event) -> None:
        """Report the last event of a job; of a named session, after its turn is saved."""
        session = job.session
        assert session is not None
        if session.name is None:
            job.end(last)  # first, so that the client does not wait for the store
            self.sessions.finish(session, complete=isinstance(last, Finished))
            return
        session.state = State.SAVING
        try:
            session.work = self.sessions.storage.save(session)
        except MemoryError:
            session.unsaved = "The last turn is not saved: there was not enough memory."
        self._saving[job] = last
        self._report_saved()

    def _report_saved(self) -> None:
        for job in [job for job in self._saving if job.session is None or not job.session.working]:
            followed = job.session is not None and job.session.followed
            self._leave(job, self._saving.pop(job), stay=not followed)

    def _leave(self, job: Job, last: Event, stay: bool) -> None:
        """Mark the session of a job as idle, and report the job's last event, also if memory runs out meanwhile."""
        assert job.session is not None
        try:
            self.sessions.leave(job.session, stay)
        finally:  # a job in no list would never end
            job.end(last)
