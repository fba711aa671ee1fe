"""Beginnings of prompts in the store: what an empty session begins with, if no session in memory has more of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.store import LOCAL
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.engine.answer import message_end
from kvkeep.errors import KvkeepError, place_of
from kvkeep.memory.rows import BLOCK
from kvkeep.serve.session import OpenSession, State
from kvkeep.serve.session_storage import SessionStorage

log = logging.getLogger(__name__)

T = TypeVar("T")
MIN_PREFIX_TOKENS = 32
"""The minimum number of tokens of a prefix."""


class Beginnings:
    """The texts of sessions without a name, as blocks of the store (:mod:`kvkeep.blocks.beginnings`): an answer's text
    is stored, and a prompt begins with the stored blocks of its owner. Whatever fails, the text is read again."""

    def __init__(self, model: Any, storage: SessionStorage) -> None:
        self._model, self._storage = model, storage
        self.ending = False
        """Whether storing ends early, because the server has to end."""
        self._problems = dict[str, str]()  # why blocks are not stored, or not used, if the last try failed

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

    def watch(self, session: OpenSession, prompt: Sequence[int], ends: Collection[int]) -> None:
        """Prepare a session without a name, which reads a prompt next, for :meth:`keep` and for the prompt after it.
        ends: ids that end an answer."""
        if session.name is None and session.cache.stream.moving:
            known, message = session.cache.get_seq_length(), message_end(prompt, ends)
            beginnings.watch(session.cache, known, len(prompt) - 1, message_end=message)

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
        """Return the result of ``work``; None if it raises. The log has the reason, unless the last try had it."""
        try:
            found = work()
        except Exception as error:
            problem = str(error) if isinstance(error, KvkeepError) else place_of(error)
            if problem != self._problems.get(what):
                log.warning("Beginnings %s: %s", what, problem)
            self._problems[what] = problem
            return None
        self._problems.pop(what, None)
        return found
