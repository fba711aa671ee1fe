"""Admission: the queue of answers. They begin in order, when memory is granted.

All sessions together stay within a limit of memory at every step. Budgets are hard, so the peak of a session is known
before its answer begins. An answer begins when its peak is granted, and keeps the grant until it ends. An idle session
counts with its current bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from transformers.modeling_utils import PreTrainedModel

from kvkeep.blocks.folder import BlockName
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText, common_prefix
from kvkeep.errors import BudgetError, EntriesLost, PromptTooLong, QueueFull, SessionMismatch
from kvkeep.memory.rows import BLOCK
from kvkeep.policies.methods import Request
from kvkeep.serve.session import (
    Event,
    Finished,
    Job,
    Name,
    OpenSession,
    PendingPrefix,
    SessionBytes,
    State,
    is_under_way,
    peak_bytes,
    total_bytes,
)
from kvkeep.serve.session_pool import Prefix, SessionPool

MEGA = 1e6


@dataclass
class Arbiter:
    """Grants memory within ``total`` bytes."""

    total: int

    def check(self, wanted: int) -> None:
        """Raise BudgetError if ``wanted`` bytes exceed the total."""
        if wanted > self.total:
            raise BudgetError(
                f"The request needs up to {wanted / MEGA:.1f} MB of cache, and the server has {self.total / MEGA:.1f} "
                "MB for all sessions; use a smaller budget or fewer tokens, or start the server with more --memory."
            )

    def fitting(self, cache: KeepCache, tokens: int) -> int:
        """Return how many sessions like ``cache``, with ``tokens`` tokens, can be answered at the same time."""
        return self.total // peak_bytes(cache, tokens)

    def grants(self, wanted: int, others: Iterable[SessionBytes]) -> bool:
        """Return whether ``wanted`` more bytes fit beside ``others``."""
        return wanted + total_bytes(others) <= self.total


class Admission:
    """The queue of an engine, whose thread alone uses it. running, saving: the engine's admitted answers, and those
    whose turn is being saved. limit: the maximum number of waiting answers."""

    def __init__(
        self,
        model: PreTrainedModel,
        arbiter: Arbiter,
        sessions: SessionPool,
        running: list[Job],
        saving: Collection[Job],
        limit: int,
    ) -> None:
        self.model, self.arbiter, self.sessions = model, arbiter, sessions
        self.waiting: deque[Job] = deque()
        self.count = 0
        """Answers that wait here or in the engine's inbox."""
        self._running, self._saving, self._limit, self._lock = running, saving, limit, threading.Lock()
        self._refused: tuple[Job, object] | None = None  # the job that waits for memory, and the holders of memory then

    def enter(self) -> None:
        """Count one more answer. Any thread may call this. Raises QueueFull."""
        with self._lock:
            if self.count >= self._limit:
                raise QueueFull(f"The queue is full ({self._limit} requests); retry later.")
            self.count += 1

    def _leave(self, job: Job) -> None:
        """Remove an answer that no longer waits."""
        self.waiting.remove(job)
        with self._lock:
            self.count -= 1

    def drop_cancelled(self) -> None:
        """End the waiting answers that were cancelled."""
        for job in [job for job in self.waiting if job.cancelled and not is_under_way(job.opening)]:
            self._dismiss(job, Finished("cancelled", "", (), 0, 0, 0))

    def _dismiss(self, job: Job, last: Event) -> None:
        """End an answer that never began; release the session that was opened for it."""
        if job.opening is not None:
            with suppress(Exception):  # it may have failed to open
                self.sessions.named(job)
        session = None if job.name is None else self.sessions.memory.get(job.name)
        if session is not None and not session.busy:
            self.sessions.leave(session)
        self._leave(job)
        job.end(last)

    def admit(self) -> None:
        """Begin waiting answers in order, when memory is granted. No answer overtakes one that waits for memory. An
        answer waits without blocking others if its session is busy or being opened, or if its beginning is being
        looked up, stored, or read by another answer."""
        busy = {job.name for job in (*self._running, *self._saving)} - {None}
        for job in [*self.waiting]:
            if job.name in busy or self._is_waiting(job):
                busy |= {job.name} - {None}  # a session's turns stay in order
                continue
            if self._refused == (job, self._in_memory):  # no memory was released after the refusal
                return
            try:
                session = self._session(job)
                if session is not None:
                    found = self._beginning(job, session)
                    if found is None:
                        busy |= {job.name} - {None}
                        continue
                    if not self._begun(job, session, *found):
                        return
            except Exception as error:
                if job.name is not None and job.name in self.sessions.memory:
                    self.sessions.leave(self.sessions.memory[job.name])
                job.end(job.failure(error))
            if job.name is not None:
                busy.add(job.name)
            if job.opening is None:
                self._leave(job)

    def _session(self, job: Job) -> OpenSession | None:
        """Return the session that an answer continues; None while it is being opened. Raises the error of that."""
        if job.name is None:
            job.session = job.session or OpenSession(None, CachedText(KeepCache(self.model, **job.cache)), job.owner)
            return job.session
        session = self.sessions.named(job)
        if session is not None and job.names_cache:
            wanted, fixed = Request.parse(**job.cache), session.cache.request
            if (wanted.method.pinned(fixed.method.pin), wanted.budget) != (fixed.method, fixed.budget):
                budget = "no budget" if fixed.budget is None else f"budget '{fixed.budget}'"
                raise SessionMismatch(
                    f"The session '{job.name[1]}' has method '{fixed.method.name}' and {budget}, which cannot be "
                    "changed; leave method and budget out, or use another session name."
                )
        if session is not None:
            self._limit_to_positions(job, session.cache)
        return session

    def _limit_to_positions(self, job: Job, cache: KeepCache) -> None:
        """Let an answer end with the model's positions if the session goes no further, where a new one would: the
        request was not checked for them. Raises PromptTooLong."""
        positions, tokens = cache.geometry.max_positions, len(job.ask.prompt)
        if positions is None or cache.method.any_length or tokens + job.ask.max_tokens <= positions:
            return
        if not Request.parse(**job.cache).method.any_length:  # the request was checked
            return
        if tokens >= positions:
            raise PromptTooLong.of(tokens, positions)
        job.ask = replace(job.ask, max_tokens=positions - tokens)

    def _beginning(self, job: Job, session: OpenSession) -> tuple[Prefix | None, Sequence[BlockName]] | None:
        """Return what an empty session can begin its prompt with: a prefix in memory, or more blocks of the store. None
        if the answer has to wait for it without blocking others."""
        prefix = self.sessions.prefix(job, session, self._running)
        if isinstance(prefix, PendingPrefix):
            job.waits_for = prefix
            return None
        if prefix is not None and prefix.session.storing:
            prefix.session.state = State.YIELDING
            if prefix.session.work is not None:
                prefix.session.work.cancel()
            return None
        known = 0 if prefix is None else len(prefix.ids)
        if session.state is State.PARKED or session.past.ids:
            return prefix, ()
        job.found = job.found or self.sessions.beginnings.find(session, job.ask.prompt, known)
        if job.found is None:
            return prefix, ()
        if not job.found.done():
            return None
        blocks = job.found.result()
        longer = not known or (len(blocks) - 1) * BLOCK >= known  # the last one may have few of the prompt's tokens
        return (None, blocks) if blocks and longer else (prefix, ())

    def _is_waiting(self, job: Job) -> bool:
        """Return whether another answer is still reading a prefix of the job's prompt, which the job can then reuse."""
        if job.waits_for is not None and (job.waits_for.done or job.waits_for.job not in self._running):
            job.waits_for = None
        return job.waits_for is not None

    @property
    def _in_memory(self) -> frozenset[int | Name]:
        """The running answers, and the sessions that hold memory."""
        return frozenset([*map(id, (*self._running, *self._saving, *self.sessions.storing)), *self.sessions.memory])

    def _begun(self, job: Job, session: OpenSession, prefix: Prefix | None, blocks: Sequence[BlockName]) -> bool:
        """Grant memory to an answer and begin it, with ``prefix`` or ``blocks`` of the store if there are any; restore
        the session if necessary. Return False if the answer has to wait. Raises the error of beginning it."""
        peak = session.peak_bytes(len(job.ask.prompt) + job.ask.max_tokens, len(blocks) * BLOCK)
        self.arbiter.check(peak)
        peak = max(peak, session.memory_bytes)  # a cache that is longer than needed keeps its memory
        grant = self._grant(session, peak, prefix)
        if grant is None:
            self._refused = job, self._in_memory
            return False
        granted, way, giver = grant
        for one in way:
            self.sessions.park(one)
        known = session.past.ids if prefix is None else prefix.session.past.ids
        shared = common_prefix(known, job.ask.prompt)
        job.diverged = shared if 0 < shared < min(len(known), len(job.ask.prompt)) else None
        if giver is not None and prefix is not None:
            session.worth = prefix.worth
            try:
                session.past = giver.past if giver in way else prefix.past()
            except EntriesLost:  # the next step finds another beginning; a giver that is busy fails then
                if not giver.busy:
                    self.sessions.leave(giver, stay=False)
                return False
            self.sessions.use(giver)
        work: Future[None] | None = None
        if session.state is State.PARKED:
            work = self.sessions.storage.restore(session)
        else:
            session.past.align(job.ask.prompt, job.cache.get("pin"))
            if blocks:
                work = self.sessions.beginnings.begin(session, blocks, job.ask.prompt)
        job.session, job.granted, self._refused = session, granted, None
        self._running.append(job)
        self.sessions.begin(session, work)
        return True

    def _grant(
        self, session: OpenSession, peak: int, prefix: Prefix | None
    ) -> tuple[int, list[OpenSession], OpenSession | None] | None:
        """Return the bytes to grant, the sessions to evict for them, and the one that gives ``prefix``, which it keeps
        if there is memory for both; None if there is no memory."""
        giver = None if prefix is None else prefix.session
        if prefix is not None and not prefix.taken:
            granted = max(peak, prefix.copied)
            if (way := self._way(session, granted - prefix.once, staying=giver)) is not None:
                return granted, way, giver
        giver = None if giver is None or giver.busy else giver
        granted = peak if giver is None else max(peak, giver.memory_bytes)
        way = self._way(session, granted, going=giver)
        return None if way is None else (granted, way, giver)

    def _way(
        self, session: OpenSession, wanted: int, going: OpenSession | None = None, staying: OpenSession | None = None
    ) -> list[OpenSession] | None:
        """Return the idle sessions to evict so that ``session`` can have ``wanted`` bytes; None if all are not enough.
        ``going`` is always evicted, ``staying`` never, and the others in :meth:`SessionPool.in_order_of_eviction`."""
        others = {one: one.counted for one in self.sessions.memory.values() if one not in (session, going)}
        others |= {
            job.session: (job.granted, job.session.counted[1]) for job in self._running if job.session is not None
        }
        gone = [] if going is None else [going]
        if self.arbiter.grants(wanted, others.values()):
            return gone
        for one in self.sessions.in_order_of_eviction():
            if one in others and one is not staying:
                gone.append(one)
                del others[one]
                if self.arbiter.grants(wanted, others.values()):
                    return gone
        return None
