"""The sessions in memory, the order of their eviction, and the beginnings of prompts that they share.

Eviction closes a session in the store and releases its cache. The next request restores the same entries
(:mod:`~kvkeep.serve.session_storage`). Only the engine's thread uses the pool. Caches are created in that thread,
because a method may run the model for it (a selector may measure its budgets on the model, once).

**Prefixes.** An empty session can begin its prompt with tokens that another session of the same owner has read. Only
exact caches of one kind share prefixes, because their output depends only on the tokens. Where the CPU kernel attends
to them, sessions share the blocks of ``full`` in memory, and those of ``kv-direct`` on disk. Another cache is copied,
if the prefix is at least half of the tokens that its session has read. An unnamed session stays in memory after its
answer until the memory is needed, so clients without session names can continue their conversations. Beyond its exact
part, a text of ``endless`` depends on more than its tokens: another conversation copies at most that part, and only its
own next turn takes the session over.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvkeep import transfer
from kvkeep.blocks.store import Store
from kvkeep.blocks.value import part_left
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText, common_prefix
from kvkeep.engine.batch import can_pack
from kvkeep.errors import SessionBusy
from kvkeep.native.library import trim_memory
from kvkeep.native.room import has_room
from kvkeep.plan.sizes import widest_bytes
from kvkeep.serve.beginnings import MIN_PREFIX_TOKENS, Beginnings
from kvkeep.serve.eviction import by_value
from kvkeep.serve.session import (
    KINDS,
    Job,
    Name,
    OpenSession,
    PendingPrefix,
    State,
    bytes_by_kind,
    is_under_way,
    shared_parts,
)
from kvkeep.serve.session_storage import OpenedSession, SessionStorage

log = logging.getLogger(__name__)

TRIM_BYTES = 2**25
"""Released bytes after which memory is returned to the system. This takes 12 ms of every second of reading a prompt."""
EVICTION_INTERVAL_S = 60.0
"""Seconds between two evictions of what is over the store's quota and age."""


class SessionPool:
    """Sessions by key, the least recently used first. store: their store, if there is one. wake: called from threads
    after each piece of work in the store."""

    def __init__(self, model: Any, tokenizer: Any, store: Store | None, wake: Callable[[], None]) -> None:
        self.storage = SessionStorage(store, model, tokenizer, wake)
        self.beginnings = Beginnings(model, self.storage)
        self.memory: OrderedDict[Name, OpenSession] = OrderedDict()
        self.released_bytes = 0
        """Bytes released since memory was last returned to the system."""
        self._model = model
        self._interrupted: list[OpenSession] = []
        self._evicted = 0.0

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes of all caches by kind, those on disk included; shared parts are counted once."""
        kinds, parts = Counter[str](), dict[int, int]()
        for session in self.memory.values():
            kinds.update(bytes_by_kind(session.cache))
            shared = shared_parts(session.cache)
            kinds["resident"] -= sum(shared.values())
            parts |= shared
        kinds["resident"] += sum(parts.values())
        return {kind: kinds[kind] for kind in KINDS}

    def idle(self) -> list[OpenSession]:
        """Return the sessions that can be evicted, the least recently used first."""
        return [one for one in self.memory.values() if not one.busy]

    def in_order_of_eviction(self) -> list[OpenSession]:
        """Return the sessions that can be evicted, in order: unnamed ones by value, because clients cannot request them
        again; then the least recently used; last those with an unsaved turn."""
        idle = self.idle()
        named = sorted((one for one in idle if one.name is not None), key=lambda one: one.unsaved is not None)
        return [*by_value(one for one in idle if one.name is None), *named]

    @property
    def storing(self) -> list[OpenSession]:
        """Unnamed sessions whose blocks are being stored after their answers."""
        return [one for one in self.memory.values() if one.name is None and one.storing]

    def prefix(self, job: Job, session: OpenSession, running: Iterable[Job]) -> Prefix | PendingPrefix | None:
        """Return the longest available prefix of the job's prompt for its session, which has read nothing. If one of
        the ``running`` jobs is reading a longer one, return that; None if there is neither, or if the session's kind
        cannot share prefixes."""
        if session.state is State.PARKED or session.past.ids or session.cache.exactness != "exact":
            return None
        prompt, best = [*job.ask.prompt[:-1]], Prefix(session, ())
        reader: PendingPrefix | None = None
        known = [(one, one.past.ids) for one in (*self.idle(), *self.storing) if _same_kind(one, session)]
        for one in running:
            if one.session is None or one.session.cache.draft_passes is not None or not can_pack(one.session.cache):
                continue  # its cache has unfinished work between two steps
            if _same_kind(one.session, session):
                known.append((one.session, one.known))
                longest = _prefix(one.ask.prompt, prompt, one.session)
                if not one.writes and len(longest) > len(best.ids):
                    best, reader = Prefix(one.session, longest), PendingPrefix(one, len(longest))
        for other, ids in known:
            found = _prefix(ids, prompt, other)
            if len(found) >= max(1, len(best.ids)):
                best, reader = Prefix(other, found), None
        return reader or (best if best.ids else None)

    def named(self, job: Job) -> OpenSession | None:
        """Return the session of a job's name; None while it is being opened. Raises SessionError, and as KeepCache."""
        assert job.name is not None
        if job.opening is None:
            if (known := self.get(job.name)) is not None:
                return known
            job.opening = self.storage.open(job.name, job.cache)
        if is_under_way(job.opening):
            return None
        opening, job.opening = job.opening, None
        return self.adopt(opening.result())

    def get(self, name: Name) -> OpenSession | None:
        """Return the session in memory that can be continued; None if it has to be opened first."""
        return self.memory.get(name)

    def adopt(self, opened: OpenedSession) -> OpenSession:
        """Return an opened session, with an empty cache, whose turns must be restored. Raises as :meth:`named`."""
        made = self.memory[opened.name] = self.storage.naming_session(opened.name, lambda: opened.session(self._model))
        return made

    def begin(self, session: OpenSession, work: Future[None] | None) -> None:
        """Mark a session as answering, after ``work`` in the store if there is some."""
        session.work = work
        session.enter(State.ANSWERING if work is None else State.RESTORING)
        self.memory[session.key] = session
        self.use(session)

    def use(self, session: OpenSession) -> None:
        """Mark a session as the most recently used."""
        session.used = time.time()
        if session.key in self.memory:
            self.memory.move_to_end(session.key)

    def leave(self, session: OpenSession, stay: bool = True) -> None:
        """Mark a session as idle; remove it if it has read nothing, unless it has turns in the store or had read
        something before an error."""
        empty, session.work = not session.cache.get_seq_length(), None
        session.enter(State.PARKED if empty and session.has_turns else State.IDLE)
        if not stay or (empty and not session.has_turns and not session.emptied):
            self.park(session)

    def finish(self, session: OpenSession, complete: bool) -> None:
        """Store the text of a session without a name whose answer has ended, or mark it as idle. complete: whether no
        error ended the answer; otherwise the text is of no use."""
        reusable = complete and len(session.past.ids) >= MIN_PREFIX_TOKENS
        session.count_use()
        try:
            if reusable and self.beginnings.stored(session):
                self.keep(session)
            else:
                self.leave(session, stay=reusable and can_share(session))
        except MemoryError:
            self.leave(session, stay=False)

    def keep(self, session: OpenSession) -> None:
        """Store the blocks of a session whose answer has ended (:meth:`leave_stored`)."""
        session.enter(State.SAVING)
        session.work = self.beginnings.keep(session)

    def leave_stored(self) -> None:
        """Mark the sessions as idle whose blocks are stored. One that can share no prefix in memory is removed."""
        for session in [one for one in self.storing if not one.working]:
            if session.state is State.YIELDING:
                self._interrupted.append(session)
            self.leave(session, stay=can_share(session))

    def resume_storing(self) -> None:
        """Store the other blocks of the sessions whose storing ended early, unless an answer has taken their caches:
        then they are stored after that answer."""
        interrupted, self._interrupted = self._interrupted, []
        for session in interrupted:
            if session.key in self.memory:
                self.keep(session)

    def park(self, session: OpenSession) -> None:
        """Evict a session; its turns remain in the store, if it is there. If the last save failed, save again first."""
        if session.unsaved is not None and not session.followed:
            self.storage.write(session)
            if session.unsaved is not None:
                log.warning("A session is evicted without its last turn.")
                if session.has_turns:  # otherwise it is forgotten
                    note = f"{session.unsaved} It was lost when the session was evicted from memory."
                    self.storage.lost_turns[session.key] = note
        self.memory.pop(session.key, None)
        if session.stored is not None:  # closed first: no error may leave it locked
            self.storage.counts["parked"] += session.state is not State.PARKED
            self.storage.close(session.stored)
        self.released_bytes += session.counted[0]

    def drop(self, name: Name) -> bool:
        """Remove a session that will be removed from the store; return whether it was in memory. Raises SessionBusy."""
        session = self.memory.get(name)
        self.storage.lost_turns.pop(name, None)
        if session is None:
            return False
        if session.busy:
            raise SessionBusy(f"The session '{name[1]}' is answering.")
        session.unsaved = None  # its last turn is discarded, too
        self.park(session)
        return True

    def facts(self, owner: str, name: str | None = None) -> dict[str, Any]:
        """Return what clients may see of the owner's sessions in memory, or of one, and notes on evicted ones, by
        name."""
        lost = {key[1]: {"note": note} for key, note in [*self.storage.lost_turns.items()] if key[0] == owner}
        opened = ((key[1], one) for key, one in self.memory.items() if key[0] == owner and name in (None, key[1]))
        return lost | {key: one.facts() for key, one in opened}

    def evict(self) -> None:
        """Enforce the store's quota and age once in :data:`EVICTION_INTERVAL_S`, age also on idle sessions."""
        store = self.storage.store
        if store is None or time.monotonic() - self._evicted < EVICTION_INTERVAL_S:
            return
        self._evicted = time.monotonic()
        for session in self.idle() if store.age is not None else ():
            if session.stored is not None and time.time() - session.used > (store.age or 0):
                self.park(session)
        self.storage.evict()

    def make_room(self, wanted: int) -> bool:
        """Evict idle sessions until the process can get ``wanted`` more bytes; return whether it can."""
        if has_room(wanted):
            return True
        trim_memory()
        for session in self.in_order_of_eviction():
            if has_room(wanted):
                return True
            self.park(session)
        return has_room(wanted)

    def trim_memory(self) -> None:
        """Return released memory to the system from time to time. Parts in use lie between it, so the process would
        otherwise grow (16 prompts of 2,048 tokens in ``full``: 400 to 550 MB more)."""
        if self.released_bytes > TRIM_BYTES:
            self.released_bytes = 0
            trim_memory()

    def close(self) -> None:
        """Finish the queued work, and close all sessions."""
        self.storage.shutdown()
        for session in [*self.memory.values()]:
            self.park(session)


# -- prefixes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, ``ids``, with which the cache of ``session`` begins."""

    session: OpenSession
    ids: Sequence[int]

    @property
    def taken(self) -> bool:
        """Whether the session's own cache is taken and not a copy: the session is idle, has no name, and has read only
        this prefix, or this prefix cannot be copied from it."""
        one, count = self.session, len(self.ids)
        copies = _cuts(one.cache, len(one.past.ids), count) and _begins_exactly(one.cache, count)
        return _can_move(one) and (count == len(one.past.ids) or not copies)

    @property
    def worth(self) -> float:
        """The part of the session's value that these tokens have, as :attr:`OpenSession.worth`."""
        return part_left(self.session.worth, len(self.ids) / max(1, len(self.session.past.ids)))

    @property
    def once(self) -> int:
        """Bytes of memory that both sessions would share."""
        cache = self.session.cache
        return transfer.shareable(cache, len(self.ids)) * cache.geometry.full_bytes_per_token

    @property
    def copied(self) -> int:
        """Bytes of a copy, if the whole cache has to be copied before it is cropped, one layer at a time."""
        session = self.session
        if transfer.lends(session.cache):
            return 0
        return session.memory_bytes + len(session.past.ids) * widest_bytes(session.cache.geometry)

    def past(self) -> CachedText:
        """Return these tokens in a new cache."""
        cache = self.session.cache
        if transfer.lends(cache):
            return CachedText(transfer.begun(cache, len(self.ids)), self.ids)
        twin = transfer.copied(cache)
        twin.crop(len(self.ids) - cache.get_seq_length())
        return CachedText(twin, self.ids)


def can_share(session: OpenSession) -> bool:
    """Return whether other sessions in memory may reuse a prefix of this one, or take its cache over."""
    return session.cache.exactness == "exact" or session.cache.method.recall.endless


def _gives(cache: KeepCache) -> bool:
    return cache.exactness == "exact" and not cache.geometry.other_layers


def _begins_exactly(cache: KeepCache, length: int) -> bool:
    """Return whether the first ``length`` tokens of a cache that can be cropped to them are read exactly."""
    exact = cache.exact_part
    return _gives(cache) or (exact is not None and length <= exact)


def _can_move(session: OpenSession) -> bool:
    return session.name is None and not session.busy and can_share(session)


def _same_kind(one: OpenSession, other: OpenSession) -> bool:
    same = one.owner == other.owner and one.cache.request == other.cache.request
    return one is not other and one.state is not State.PARKED and same and (_gives(one.cache) or _can_move(one))


def _cuts(cache: KeepCache, length: int, count: int) -> bool:
    """Return whether a cache that has read ``length`` tokens can be cropped to ``count``: to all of them, or to any
    number if no window has lost entries and there is no recurrent state."""
    windows = [layer.window for layer in cache.geometry.layers if layer.window is not None]
    return count == length or (not cache.geometry.other_layers and length < min(windows, default=length + 1))


def _prefix(ids: Sequence[int], prompt: Sequence[int], session: OpenSession) -> Sequence[int]:
    """Return the common prefix, if the cache of a session that has read ``ids`` is cropped to it for less than reading
    it costs. A cache that cannot be cropped goes back to the end of the last message before its answer: the same
    conversation goes on, with the answer in another form."""
    cache = session.cache
    if len(prompt) < MIN_PREFIX_TOKENS or [*ids[:MIN_PREFIX_TOKENS]] != prompt[:MIN_PREFIX_TOKENS]:
        return ()
    count = common_prefix(ids, prompt)
    if transfer.lacks(cache, count):
        return ()
    if not _cuts(cache, len(ids), count):
        end = cache.stream.record.message_end
        return ids[:end] if _can_move(session) and 0 < end <= count and end in cache.stream.record.ends else ()
    return ids[:count] if 2 * count >= len(ids) or transfer.lends(cache) else ()
