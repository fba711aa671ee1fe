"""What an empty session can begin its prompt with: tokens that another session of the same owner has read, or blocks of
the store (:class:`Beginnings`).

Only exact caches of one kind share prefixes, because their output depends only on the tokens. Where the CPU kernel
attends to them, sessions share the blocks of ``full`` in memory, and those of ``kv-direct`` on disk. Another cache is
copied, if the prefix is at least half of the tokens that its session has read. An unnamed session stays in memory after
its answer until the memory is needed, so clients without session names can continue their conversations. Beyond its
exact part, a text of ``endless`` depends on more than its tokens: another conversation copies at most that part, and
only its own next turn takes the session over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kvkeep import transfer
from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.store import LOCAL
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText, common_prefix
from kvkeep.engine.batch import can_pack
from kvkeep.errors import KvkeepError, place_of
from kvkeep.memory.rows import BLOCK
from kvkeep.plan.sizes import widest_bytes
from kvkeep.serve.job import Job, PendingPrefix
from kvkeep.serve.session import OpenSession, State
from kvkeep.serve.session_storage import SessionStorage

log = logging.getLogger(__name__)

T = TypeVar("T")
MIN_PREFIX_TOKENS = 32
"""The minimum number of tokens of a prefix."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, ``ids``, with which the cache of ``session`` begins."""

    session: OpenSession
    ids: Sequence[int]

    @property
    def taken(self) -> bool:
        """Whether the session's own cache is taken and not a copy: the session is idle, has no name, and has read only
        this prefix, or this prefix cannot be copied from it."""
        one = self.session
        return _can_move(one) and (len(self.ids) == len(one.past.ids) or not _begins_exactly(one.cache, len(self.ids)))

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


def find(
    job: Job, session: OpenSession, running: Iterable[Job], idle: Iterable[OpenSession]
) -> Prefix | PendingPrefix | None:
    """Return the longest available prefix of the job's prompt for its session, which has read nothing. If another job
    is reading a longer one, return that; None if there is neither, or if the session's kind cannot share prefixes."""
    if session.state is State.PARKED or session.past.ids or not _gives(session.cache):
        return None
    prompt, best = [*job.ask.prompt[:-1]], Prefix(session, ())
    reader: PendingPrefix | None = None
    known = [(one, one.past.ids) for one in idle if _same_kind(one, session)]
    for one in running:
        if one.session is not None and _same_kind(one.session, session) and _steady(one.session):
            known.append((one.session, one.known))
            longest = _prefix(one.ask.prompt, prompt, one.session.cache)
            if not one.writes and len(longest) > len(best.ids):
                best, reader = Prefix(one.session, longest), PendingPrefix(one, len(longest))
    for other, ids in known:
        found = _prefix(ids, prompt, other.cache)
        if len(found) >= max(1, len(best.ids)):
            best, reader = Prefix(other, found), None
    return reader or (best if best.ids else None)


def can_share(session: OpenSession) -> bool:
    """Return whether other sessions in memory may reuse a prefix of this one, or take its cache over."""
    return _gives(session.cache) or session.cache.method.recall.endless


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


def _steady(session: OpenSession) -> bool:
    """Return whether a cache has no unfinished work between two steps of an answer."""
    return session.cache.round is None and can_pack(session.cache)


def _prefix(ids: Sequence[int], prompt: Sequence[int], cache: KeepCache) -> Sequence[int]:
    """Return the common prefix, if a cache that has read ``ids`` is cropped to it for less than reading it costs."""
    if len(prompt) < MIN_PREFIX_TOKENS or [*ids[:MIN_PREFIX_TOKENS]] != prompt[:MIN_PREFIX_TOKENS]:
        return ()
    count = common_prefix(ids, prompt)
    if transfer.lacks(cache, count):
        return ()
    windows = [layer.window for layer in cache.geometry.layers if layer.window is not None]
    cuts = count == len(ids) or len(ids) < min(windows, default=len(ids) + 1)
    return ids[:count] if cuts and (2 * count >= len(ids) or transfer.lends(cache)) else ()


class Beginnings:
    """The texts of sessions without a name, as blocks of the store (:mod:`kvkeep.blocks.beginnings`): an answer's text
    is stored, and a prompt begins with the stored blocks of its owner. Whatever fails, the text is read again."""

    def __init__(self, model: Any, storage: SessionStorage) -> None:
        self._model, self._storage = model, storage
        self.ending = False
        """Whether storing ends early, because the server has to end."""
        self._problem: str | None = None  # why blocks were not stored last time

    def stored(self, session: OpenSession) -> bool:
        """Return whether the beginnings of sessions of this kind are stored."""
        return self._storage.store is not None and beginnings.begins(session.cache)

    def find(self, session: OpenSession, prompt: Sequence[int], known: int) -> Future[list[BlockName]] | None:
        """Find the stored blocks with which an empty session can begin ``prompt``. Return None if they cannot be
        worth it beside the ``known`` tokens that it can get from memory."""
        least = known + BLOCK if known else MIN_PREFIX_TOKENS
        if least >= len(prompt) or not self.stored(session):
            return None
        assert self._storage.store is not None
        folder, space, cache = self._storage.store.blocks, session.owner or LOCAL, session.cache

        def found() -> list[BlockName]:
            return beginnings.find(folder, space, cache, prompt)

        return self._storage.reader.run(lambda: self._trying("are not used", found) or [])

    def begin(self, session: OpenSession, blocks: Sequence[BlockName], prompt: Sequence[int]) -> Future[None]:
        """Begin an empty session, whose memory was granted, with stored blocks."""
        assert self._storage.store is not None
        folder = self._storage.store.blocks
        cache = KeepCache(self._model, request=session.cache.request)  # the session's own may be read meanwhile

        def begun() -> None:
            if count := beginnings.begin(folder, cache, blocks, prompt):
                session.past = CachedText(cache, prompt[:count])

        return self._storage.reader.run(lambda: self._trying("are not used", begun))

    def watch(self, session: OpenSession, prompt: int) -> None:
        """Prepare a session without a name, which reads a prompt of so many tokens next, for :meth:`keep`."""
        if session.name is None and self._storage.store is not None:
            beginnings.watch(session.cache, session.cache.get_seq_length(), prompt - 1)

    def keep(self, session: OpenSession) -> Future[None]:
        """Store the whole blocks of a session's text; end early if the session is to yield, or at the server's end."""

        def stop() -> bool:
            return session.state is State.YIELDING or self.ending

        def kept() -> None:
            store = self._storage.store
            assert store is not None
            store.create()
            beginnings.keep(store.blocks, session.owner or LOCAL, session.cache, session.past.ids, stop)

        return self._storage.writer.run(lambda: self._trying("are not stored", kept))

    def _trying(self, what: str, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; if it raises, write a reason to the log that is not there yet, and return
        None."""
        try:
            return work()
        except Exception as error:
            problem = str(error) if isinstance(error, KvkeepError) else place_of(error)
            if problem != self._problem:
                log.warning("Beginnings %s: %s", what, problem)
            self._problem = problem
            return None
