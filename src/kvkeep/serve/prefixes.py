"""Prefixes: a session reuses the first tokens of a prompt if another session of the same owner has read them.

Only exact caches of one kind share prefixes, because their output depends only on the tokens. Where the CPU kernel
attends to them, sessions share the blocks of ``full`` in memory, and those of ``kv-direct`` on disk. Another cache is
copied, if the prefix is at least half of the tokens that its session has read. An unnamed session stays in memory after
its answer until the memory is needed, so clients without session names can continue their conversations. Beyond its
exact part, a text of ``endless`` depends on more than its tokens: another conversation copies at most that part, and
only its own next turn takes the session over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep import transfer
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText, common_prefix
from kvkeep.engine.batch import can_pack
from kvkeep.plan.sizes import widest_bytes
from kvkeep.serve.job import Job, PendingPrefix
from kvkeep.serve.session import OpenSession

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
    if session.away or session.past.ids or not _gives(session.cache):
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
    return one is not other and not one.away and same and (_gives(one.cache) or _can_move(one))


def _steady(session: OpenSession) -> bool:
    """Return whether a cache has no unfinished work between two steps of an answer."""
    return session.cache.round is None and can_pack(session.cache)


def _prefix(ids: Sequence[int], prompt: Sequence[int], cache: KeepCache) -> Sequence[int]:
    """Return the common prefix, if a cache that has read ``ids`` is cropped to it for less than reading it costs."""
    if len(prompt) < MIN_PREFIX_TOKENS or [*ids[:MIN_PREFIX_TOKENS]] != prompt[:MIN_PREFIX_TOKENS]:
        return ()
    count = common_prefix(ids, prompt)
    if cache.lacks(count):
        return ()
    windows = [layer.window for layer in cache.geometry.layers if layer.window is not None]
    cuts = count == len(ids) or len(ids) < min(windows, default=len(ids) + 1)
    return ids[:count] if cuts and (2 * count >= len(ids) or transfer.lends(cache)) else ()
