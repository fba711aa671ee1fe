"""The engine: one thread owns the model, every session its own cache, one forward pass a step for all of them.

A step reads one token, or one verifying run, of every session that writes, and one chunk of one that reads its prompt,
in turn. Chunks are cut as they are for a session alone, so an answer does not depend on what else runs: tokens are
those of :func:`kvkeep.generate`. What cannot be packed (:func:`~kvkeep.serve.batch.packs`) is read by itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.decode.past import Past
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.loading import Loaded
from kvkeep.policies.request import Request
from kvkeep.serve.answer import Answer, Ask, Piece, Reads
from kvkeep.serve.arbiter import Arbiter, held, most
from kvkeep.serve.batch import Read, forward, packs

T = TypeVar("T")

CHUNK = 512
"""Tokens of a prompt read in a step where the method itself sets no limit and does not mind."""
WAITING = 64
"""Answers that may wait for memory."""


class Full(KvkeepError):
    """So many answers wait that no more are taken; ask again later."""


class Stopping(KvkeepError):
    """The engine ends, and takes no more."""


@dataclass(frozen=True)
class Ended:
    """How an answer ended. reason: "stop", "length" or "cancelled". cached, read, written: tokens of the prompt that
    were not read again, those that were, and those of the answer."""

    reason: str
    text: str
    tokens: tuple[int, ...]
    cached: int
    read: int
    written: int


Event = Piece | Ended | KvkeepError
"""What a job tells: pieces of text, and at last how it ended, or the error that it failed by."""


@dataclass(eq=False)
class Session:
    """A conversation's cache, and what it has read. name: (owner, name), None for one that ends with its answer."""

    name: tuple[str, str] | None
    past: Past


@dataclass(eq=False)
class Job:
    """One answer, from request to end. tell: is called by the engine's thread with each event, and must not wait."""

    ask: Ask
    tell: Callable[[Event], None]
    name: tuple[str, str] | None
    cache: Mapping[str, Any]  # what its session is, if it is new, as KeepCache takes it
    own: bool = False  # whether the request named it
    session: Session | None = None
    granted: int = 0
    answer: Answer | None = None
    at: float = field(default_factory=time.monotonic)  # when it was asked for, and from its first token on the last's
    _reads: Reads | None = None
    _wanted: Read | None = None
    _left: deque[int] = field(default_factory=deque)  # sizes of the chunks of what is wanted that are to come
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Let it end at the next token or chunk; from any thread."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()


class Watch:
    """What is told of an engine's work, by its own thread, and must not wait. This one takes no notice."""

    def stepped(self, sessions: int, tokens: int) -> None:
        """A step has read ``tokens`` tokens of so many sessions."""

    def wrote(self, tokens: int, seconds: float, first: bool) -> None:
        """An answer has so many tokens more, ``seconds`` after those before, or after it was asked for."""


class Engine:
    """Answers for many sessions within ``memory`` bytes.

    cache: method, budget and options of sessions that name none. waiting: how many answers may wait for memory. Use
    :meth:`start` for a thread of its own, or call :meth:`step` until it returns False.
    """

    def __init__(
        self,
        loaded: Loaded,
        memory: int,
        waiting: int = WAITING,
        **cache: Any,
    ) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.cache = cache
        self.arbiter, self.limit = Arbiter(memory), waiting
        self.geometry = ModelGeometry.from_config(self.model.config, next(self.model.parameters()).dtype.itemsize)
        self.sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()  # the least recently used first
        self.running: list[Job] = []
        self.watch = Watch()
        self._inbox: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._count = 0  # of those in the inbox and waiting
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = self._ended = False
        self.fault: BaseException | None = None
        self.beat = time.monotonic()
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        self.ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    # -- from any thread ------------------------------------------------------------------------------

    def submit(
        self,
        ask: Ask,
        tell: Callable[[Event], None],
        *,
        name: tuple[str, str] | None = None,
        **cache: Any,
    ) -> Job:
        """Ask for an answer. name: owner and name of the session that goes on. cache: method, budget and options of a
        :class:`~kvkeep.cache.KeepCache`, of a session that is new; by default the engine's. Raises Full, Stopping, or
        UsageError for what can never be answered."""
        positions = self.geometry.max_positions
        if not ask.prompt:
            raise UsageError("There is nothing to answer: the prompt is empty.")
        if positions is not None and len(ask.prompt) >= positions:
            raise UsageError(
                f"The prompt has {len(ask.prompt)} tokens and the model has {positions} positions; shorten it to at "
                f"most {positions - 1}."
            )
        job = Job(ask, tell, name, cache or self.cache, bool(cache))
        with self._lock:
            if self._stopping:
                raise Stopping("The server is ending and takes no more; ask again when it is back.")
            if self._count >= self.limit:
                raise Full(f"{self._count} answers wait already; ask again later.")
            self._count += 1
        self._inbox.put(job)
        return job

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Let the engine's thread do ``work`` between two steps, when no cache is in the middle of one; the future has
        what it returns or raises. It must be short: everybody waits for it. Raises Stopping after the end."""
        future: Future[T] = Future()

        def done() -> None:
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._ended:
                raise Stopping("The engine has ended.")
            self._inbox.put(done)
        return future

    @property
    def waiting(self) -> int:
        """How many answers have not begun."""
        return self._count

    @property
    def stopping(self) -> bool:
        """Whether it takes no more."""
        return self._stopping

    def start(self) -> None:
        """Run steps in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="kvkeep-engine", daemon=True)
        self._thread.start()

    def stop(self, grace: float = 10.0) -> None:
        """Take no more, let what runs go on for ``grace`` seconds, cancel the rest, and end the thread."""
        with self._lock:
            self._stopping = True
        self._inbox.put(None)
        deadline = time.monotonic() + grace
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.05)
            if time.monotonic() > deadline:
                for job in [*self.running, *self._waiting]:
                    job.cancel()

    def join(self) -> None:
        """Wait until its thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self.step(wait=True):
                pass
        except BaseException as error:
            self.fault = error
            with self._lock:
                self._stopping = True
            self._take_in(False)
            for job in [*self.running, *self._waiting]:
                job.tell(KvkeepError(f"The engine has failed ({type(error).__name__}); the answer is lost."))
            raise
        finally:
            with self._lock:
                self._ended = True
            self._take_in(False)  # nobody waits for an answer that does not come

    # -- in the engine's thread -----------------------------------------------------------------------

    def step(self, wait: bool = False) -> bool:
        """Do one step: take what came in, and read for everybody once. ``wait``: for something to do, if there is
        nothing. Return False when it was stopped and nothing is left to do."""
        self._take_in(wait and not self.running and not self._waiting)
        self._drop_cancelled()
        self._admit()
        self.beat = time.monotonic()
        jobs = self._turn()
        if jobs:
            self._read(jobs)
        return bool(self.running or self._waiting) or not self._stopping

    def _take_in(self, wait: bool) -> None:
        while True:
            try:
                given = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if isinstance(given, Job):
                self._waiting.append(given)
            elif given is not None:
                given()

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._counted(-1)
            job.tell(Ended("cancelled", "", (), 0, 0, 0))
        for job in [job for job in self.running if job.cancelled]:
            self._end(job, "cancelled")

    def _counted(self, change: int) -> None:
        with self._lock:
            self._count += change

    def _admit(self) -> None:
        """Begin waiting answers in order, as far as memory is granted: nobody overtakes one that waits for memory. One
        whose session is busy waits for that alone."""
        busy = {job.name for job in self.running} - {None}
        for job in [*self._waiting]:
            if job.name in busy:
                continue
            try:
                if not self._begun(job):
                    return
            except KvkeepError as error:
                job.tell(error)
            except Exception as error:
                job.tell(KvkeepError(f"The answer failed ({type(error).__name__}: {error})."))
            self._waiting.remove(job)
            self._counted(-1)
            if job.name is not None:
                busy.add(job.name)

    def _begun(self, job: Job) -> bool:
        """Grant memory to an answer and begin it; False: it has to wait. Raises what it fails by."""
        session = self.sessions.get(job.name) if job.name is not None else None
        if session is None:
            session = Session(job.name, Past(KeepCache(self.model, **job.cache)))
        elif job.own and Request.parse(**job.cache) != session.past.cache.request:
            raise UsageError(
                f"The session '{job.name[1] if job.name else ''}' goes on by the method and budget that it began with, "
                "which are others; leave them out, or take another name."
            )
        tokens = len(job.ask.prompt) + job.ask.most
        wanted = most(session.past.cache, tokens)
        self.arbiter.check(wanted)
        others = [one for one in self.sessions.values() if one is not session]
        busy = {id(running.session) for running in self.running}
        idle = {one.name: held(one.past.cache) for one in others if id(one) not in busy}
        missing = self.arbiter.short(wanted, (running.granted for running in self.running), idle.values())
        if missing > sum(idle.values()):
            return False
        for name in list(idle):  # the least recently used first
            if missing <= 0:
                break
            missing -= idle[name]
            self.forget(name)  # type: ignore[arg-type]
        session.past.align(job.ask.prompt, crops=session.past.cache.exactness == "exact")
        job.session, job.granted = session, wanted
        job.answer = Answer(job.ask, session.past.cache, self.tokenizer, self.ends, job.tell)
        job._reads = job.answer.reads()
        self._want(job, next(job._reads))
        if session.name is not None:
            self.sessions[session.name] = session
            self.sessions.move_to_end(session.name)
        self.running.append(job)
        return True

    def forget(self, name: tuple[str, str]) -> None:
        """Let a session go; it is read again when it is asked for."""
        self.sessions.pop(name, None)

    def _want(self, job: Job, read: Read) -> None:
        """Note what a job wants to read next, in chunks as they are cut for it alone: the first takes the remainder."""
        chunk, count = self._chunk(read.cache), len(read.ids)
        whole, rest = divmod(count, chunk)
        job._wanted, job._left = read, deque(([rest] if rest else []) + [chunk] * whole)

    @staticmethod
    def _chunk(cache: KeepCache) -> int:
        own: int = cache.stream.chunk
        free = own > CHUNK and cache.method.exactness == "exact" and not cache.method.oneshot
        return CHUNK if free else own

    def _turn(self) -> list[Job]:
        """Return whose turn it is: all that write, and one that reads a prompt, in turn."""
        writing = [job for job in self.running if self._writes(job)]
        reading = [job for job in self.running if not self._writes(job)]
        if reading:
            self.running.remove(reading[0])
            self.running.append(reading[0])
        return writing + reading[:1]

    @staticmethod
    def _writes(job: Job) -> bool:
        return job.answer is not None and bool(job.answer.tokens)

    def _read(self, jobs: Sequence[Job]) -> None:
        reads = [self._part(job) for job in jobs]
        self.watch.stepped(len(reads), sum(len(read.ids) for read in reads))
        packed = [number for number, read in enumerate(reads) if packs(read.cache)]
        results: dict[int, Tensor | Exception] = {}
        if packed:
            done = forward(self.model, [reads[number] for number in packed])
            results |= dict(zip(packed, done, strict=True))
        for number, read in enumerate(reads):
            if number not in results:
                results[number] = self._alone(read)
        for number, job in enumerate(jobs):
            written = len(job.answer.tokens) if job.answer else 0
            try:
                self._give(job, results[number])
            except KvkeepError as error:
                self._fail(job, error)
            except Exception as error:
                self._fail(job, KvkeepError(f"The answer failed ({type(error).__name__}: {error})."))
            self._wrote(job, written)

    def _wrote(self, job: Job, before: int) -> None:
        """Tell the watch of the tokens that an answer has beside the first ``before``."""
        fresh = len(job.answer.tokens) - before if job.answer else 0
        if fresh:
            now = time.monotonic()
            self.watch.wrote(fresh, now - job.at, not before)
            job.at = now

    @torch.no_grad()
    def _alone(self, read: Read) -> Tensor | Exception:
        cache, ids = read.cache, torch.tensor([[*read.ids]], device=next(self.model.parameters()).device)
        first = cache.get_seq_length() if read.first is None else read.first
        positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
        cache.stream.cut = read.cut
        try:
            keep = max(1, read.keep)
            given = {"position_ids": positions, "past_key_values": cache, "use_cache": True, "logits_to_keep": keep}
            return self.model(input_ids=ids, **given).logits[0]
        except Exception as error:
            return error
        finally:
            cache.stream.cut = False

    def _part(self, job: Job) -> Read:
        """Return the next chunk of what a job wants to read."""
        read, left = job._wanted, job._left
        assert read is not None
        if len(left) == 1 and left[0] == len(read.ids):
            return read
        start = len(read.ids) - sum(left)
        last = len(left) == 1
        return Read(read.cache, read.ids[start : start + left[0]], read.keep if last else 0, not last)

    def _give(self, job: Job, result: Tensor | Exception) -> None:
        """Hand a job what it has read, and note what it wants next."""
        if isinstance(result, Exception):
            raise result
        assert job._reads is not None
        job._left.popleft()
        if job._left:
            return
        try:
            self._want(job, job._reads.send(result))
        except StopIteration:
            assert job.answer is not None
            self._end(job, job.answer.reason)

    def _end(self, job: Job, reason: str) -> None:
        answer = self._closed(job)
        fresh = len(job.ask.prompt) - answer.known
        job.tell(Ended(reason, answer.text, tuple(answer.tokens), answer.known, fresh, len(answer.tokens)))

    def _fail(self, job: Job, error: KvkeepError) -> None:
        """End a job that failed; its session goes on from where it can."""
        self._closed(job)
        job.tell(error)

    def _closed(self, job: Job) -> Answer:
        """Take a job from those that run, its session as after the last whole step, and return its answer."""
        assert job.session is not None and job.answer is not None and job._reads is not None
        past, answer = job.session.past, job.answer
        self.running.remove(job)
        with suppress(KvkeepError):  # what cannot be undone is reset, below
            job._reads.close()
        past.recover(answer.known)
        past.settle([*job.ask.prompt, *answer.tokens])
        return answer
