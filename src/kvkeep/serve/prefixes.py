"""Prefixes: what a prompt begins with is not read again where another session of the same owner has read it.

Only between exact caches of one kind: what they give depends on the tokens alone, however they came to hold them.
Blocks of ``full`` are then held once for all of them, where the CPU kernel attends to them; other caches are copied, if
that is half of what the other session has read, or more. So that clients without sessions find their conversations
again, a session without a name stays when its answer has ended, as long as nobody needs its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvkeep import transfer
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText, common_prefix
from kvkeep.engine.batch import can_pack
from kvkeep.memory.rows import BLOCK
from kvkeep.serve.job import Job, PendingPrefix
from kvkeep.serve.session import OpenSession
from kvkeep.stores.dynamic import DynamicLayer

MIN_PREFIX_TOKENS = 32
"""Tokens of a prefix that is worth it."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a prompt, ``ids``, which the cache of ``session`` begins with."""

    session: OpenSession
    ids: Sequence[int]

    @property
    def complete(self) -> bool:
        """Whether its session has read nothing else, is idle, and has no name."""
        one = self.session
        return one.name is None and not one.busy and len(self.ids) == len(one.past.ids)

    @property
    def once(self) -> int:
        """Bytes that both would hold once."""
        cache = self.session.cache
        if not _plain(cache) or not transfer.shares(cache):
            return 0
        return len(self.ids) // BLOCK * BLOCK * cache.geometry.full_bytes_per_token

    @property
    def copied(self) -> int:
        """Bytes that its copy takes, where all of the session's has to be copied before it is cut."""
        return 0 if _plain(self.session.cache) else self.session.memory_bytes

    def past(self) -> CachedText:
        """Return a past of these tokens, in a cache of its own."""
        cache = self.session.cache
        if _plain(cache):
            return CachedText(transfer.begun(cache, len(self.ids)), self.ids)
        twin = transfer.copied(cache)
        twin.crop(len(self.ids) - cache.get_seq_length())
        return CachedText(twin, self.ids)


def find(
    job: Job, session: OpenSession, running: Iterable[Job], idle: Iterable[OpenSession]
) -> Prefix | PendingPrefix | None:
    """Return the longest prefix of a job's prompt that is there for its session, which has read nothing; or who is
    reading a longer one; None where there is neither, or the session's kind cannot have any."""
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


def worth_keeping(session: OpenSession) -> bool:
    """Return whether others may begin with what a session has read."""
    return _gives(session.cache) and len(session.past.ids) >= MIN_PREFIX_TOKENS


def _gives(cache: KeepCache) -> bool:
    return cache.exactness == "exact" and not cache.geometry.other_layers


def _same_kind(one: OpenSession, other: OpenSession) -> bool:
    same = one.owner == other.owner and one.cache.request == other.cache.request
    return one is not other and not one.away and same and _gives(one.cache)


def _steady(session: OpenSession) -> bool:
    """Return whether nothing of a cache is unfinished between two steps of an answer."""
    return session.cache.round is None and can_pack(session.cache)


def _plain(cache: KeepCache) -> bool:
    """Return whether the first entries of a cache can be had without the others: it is of method ``full``."""
    layers = [cache.layers[layer.index] for layer in cache.geometry.full_layers]
    return all(isinstance(layer, DynamicLayer) and layer.limit is None for layer in layers)


def _prefix(ids: Sequence[int], prompt: Sequence[int], cache: KeepCache) -> Sequence[int]:
    """Return what both begin with, as far as a cache that has read ``ids`` can be cut there for less than reading."""
    if len(prompt) < MIN_PREFIX_TOKENS or [*ids[:MIN_PREFIX_TOKENS]] != prompt[:MIN_PREFIX_TOKENS]:
        return ()
    count = common_prefix(ids, prompt)
    windows = [layer.window for layer in cache.geometry.layers if layer.window is not None]
    cuts = count == len(ids) or len(ids) < min(windows, default=len(ids) + 1)
    return ids[:count] if cuts and (2 * count >= len(ids) or _plain(cache)) else ()
