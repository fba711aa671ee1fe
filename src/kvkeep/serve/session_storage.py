"""What a server keeps in its store (:mod:`kvkeep.blocks`): named sessions, and the beginnings of all conversations.

A named session is open for writing while it is in memory, and each turn is saved when its answer ends. After an answer
of a session without a name, its blocks are stored, and a prompt begins with the stored blocks of its owner.

One thread saves, opens and restores sessions and stores blocks, in order; a second one reads beginnings, so that a
prompt does not wait for another session's save. An error of the store affects only the session, never the engine.
Methods that return a Future queue their work; the others work in the calling thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.header import check_version
from kvkeep.blocks.sessions import Session, StoredSession, check_savable
from kvkeep.blocks.store import LOCAL, Store
from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.errors import (
    KvkeepError,
    SessionBusy,
    SessionDamaged,
    SessionError,
    SessionUnwritable,
    SessionVersion,
    place_of,
    ran_out_of_memory,
)
from kvkeep.memory.rows import BLOCK
from kvkeep.models import fingerprint
from kvkeep.native.threads import begin_thread
from kvkeep.policies.request import Request
from kvkeep.serve.prefixes import MIN_PREFIX_TOKENS
from kvkeep.serve.session import Name, OpenedSession, OpenSession

log = logging.getLogger(__name__)

T = TypeVar("T")


class SessionStorage:
    """Saves and restores sessions. store: the store; without one, or if the model's sessions cannot be saved, nothing
    is saved. wake: called from the threads after each piece of work."""

    def __init__(self, store: Store | None, model: Any, tokenizer: Any, wake: Callable[[], None]) -> None:
        self.model, self.wake = model, wake
        self.refusal: str | None = None
        """The reason why sessions of this model cannot be saved."""
        if store is not None:
            try:
                check_savable(KeepCache(model, "full"))
            except SessionError as error:
                store, self.refusal = None, str(error)
        self.store = store
        self.ending = False
        """Whether storing ends early, because the server has to end."""
        self.restored = self.saved = 0
        self.lost_turns: dict[Name, str] = {}
        """Notes on sessions that were evicted from memory without their last turn."""
        self._tokenizer: str | None = None
        if store is not None:
            self._tokenizer = fingerprint.fingerprint_of_tokenizer(tokenizer)
            fingerprint.fix(model)
        self._writer, self._reader = (
            None if store is None else ThreadPoolExecutor(1, f"kvkeep-store-{name}") for name in ("writer", "reader")
        )
        for thread in (self._writer, self._reader):
            if thread is not None:
                thread.submit(begin_thread).result()
        self._futures: list[Future[Any]] = []
        self._close_lock = threading.Lock()
        self._problem: str | None = None  # why blocks were not stored last time

    @property
    def busy(self) -> bool:
        """Whether the store is being read or written."""
        return not all(future.done() for future in self._futures)

    # -- named sessions -------------------------------------------------------------------------------

    def open(self, name: Name, options: Mapping[str, Any]) -> Future[OpenedSession]:
        """Open a session. options: KeepCache options of a new session. The future raises SessionError, and the errors
        of KeepCache."""
        return self._write(lambda: self.naming_session(name, lambda: self._open(name, options)))

    def restore(self, session: OpenSession) -> Future[None]:
        """Read a session's turns into memory that was granted."""
        assert session.name is not None
        name = session.name
        made = _done(lambda: KeepCache(self.model, request=session.cache.request))  # its cache may be read meanwhile
        return self._write(lambda: self.naming_session(name, lambda: self._restore(session, made.result())))

    def save(self, session: OpenSession) -> Future[None]:
        """Save a session's last turn; on failure, the session gets a note with the reason."""
        return self._write(lambda: self.write(session))

    def evict(self) -> None:
        """Remove blocks over the quota, and unused sessions and blocks over the age."""
        self._write(self._evict)

    def shutdown(self) -> None:
        """Finish the queued work; later work runs at once."""
        for thread in (self._writer, self._reader):
            if thread is not None:
                thread.shutdown()
        self._writer = self._reader = None
        fingerprint.release(self.model)

    def write(self, session: OpenSession) -> None:
        """Save a session's last turn now."""
        cache, stored = session.cache, session.stored
        if self.store is None:
            return
        if not cache.get_seq_length():  # the whole turn was undone: the session continues from the previous one
            session.away = stored is not None and stored.about is not None
            return
        try:
            stored = session.stored = self._create(session) if stored is None else stored
            renewed = stored.save(Session(cache, [session.past.ids], tokenizer=self._tokenizer))
        except Exception as error:
            assert session.name is not None
            session.followed = isinstance(error, SessionBusy)
            known = self._without_path(session.name, error) if isinstance(error, KvkeepError) else type(error).__name__
            known = "there was not enough memory." if ran_out_of_memory(error) else known
            session.unsaved = f"The last turn is not saved: {known}"
            log.warning("The last turn is not saved: %s", error)
        else:
            session.unsaved = None
            self.saved += 1
            if renewed:
                session.note = (
                    "Its stored files were removed or replaced while it was in use; the whole session is saved again."
                )

    def close(self, stored: StoredSession) -> None:
        """Close a session if it is open."""
        try:
            with self._close_lock:
                stored.close()
        except OSError as error:
            log.warning("A session cannot be closed: %s", error)

    def naming_session(self, name: Name, work: Callable[[], T]) -> T:
        """Return the result of ``work``; its SessionError has the session's name instead of a path."""
        try:
            return work()
        except SessionError as error:
            raise type(error)(self._without_path(name, error)) from error

    # -- beginnings -----------------------------------------------------------------------------------

    def find(self, session: OpenSession, prompt: Sequence[int], known: int) -> Future[list[BlockName]] | None:
        """Find the stored blocks with which an empty session can begin ``prompt``. Return None if they cannot be
        worth it beside the ``known`` tokens that it can get from memory."""
        least = known + BLOCK if known else MIN_PREFIX_TOKENS
        if least >= len(prompt) or not self.stores_beginnings(session):
            return None
        assert self.store is not None
        folder, space, cache = self.store.blocks, _space(session), session.cache

        def found() -> list[BlockName]:
            return beginnings.find(folder, space, cache, prompt)

        return self._read(lambda: self._trying("are not used", found) or [])

    def begin(self, session: OpenSession, blocks: Sequence[BlockName], prompt: Sequence[int]) -> Future[None]:
        """Begin an empty session, whose memory was granted, with stored blocks."""
        assert self.store is not None
        folder = self.store.blocks
        cache = KeepCache(self.model, request=session.cache.request)  # the session's own may be read meanwhile

        def begun() -> None:
            if count := beginnings.begin(folder, cache, blocks, prompt):
                session.past = CachedText(cache, prompt[:count])

        return self._read(lambda: self._trying("are not used", begun))

    def keep(self, session: OpenSession) -> Future[None]:
        """Store the whole blocks of a session's text; end early when ``session.wanted`` or
        :attr:`ending` is set."""
        return self._write(lambda: self._trying("are not stored", lambda: self._keep(session)))

    def watch(self, session: OpenSession, prompt: int) -> None:
        """Prepare a session without a name, which reads a prompt of so many tokens next, for :meth:`keep`."""
        if session.name is None and self.store is not None:
            beginnings.watch(session.cache, session.cache.get_seq_length(), prompt - 1)

    def stores_beginnings(self, session: OpenSession) -> bool:
        """Return whether the beginnings of sessions of this kind are stored."""
        return self.store is not None and beginnings.begins(session.cache)

    # -- in the threads -------------------------------------------------------------------------------

    def _write(self, work: Callable[[], T]) -> Future[T]:
        return self._queue(self._writer, work)

    def _read(self, work: Callable[[], T]) -> Future[T]:
        return self._queue(self._reader, work)

    def _queue(self, thread: ThreadPoolExecutor | None, work: Callable[[], T]) -> Future[T]:
        if thread is None:
            return _done(work)
        try:
            future = thread.submit(work)
        except (MemoryError, RuntimeError):  # its thread cannot be started
            return _done(work)
        self._futures = [*filter(lambda one: not one.done(), self._futures), future]
        future.add_done_callback(lambda _: self.wake())  # after completion, so that the waking thread finds it done
        return future

    def _open(self, name: Name, options: Mapping[str, Any]) -> OpenedSession:
        """Return the session of this name; it is new if it can neither be opened nor created now."""
        try:
            opened = self._opened(name, options)
        except SessionUnwritable as error:
            log.warning("The session '%s' begins without the store: %s", name[1], error)
            opened = OpenedSession(name, Request.parse(**options))
        return replace(opened, note=opened.note or self.lost_turns.pop(name, None))

    def _opened(self, name: Name, options: Mapping[str, Any]) -> OpenedSession:
        request = Request.parse(**options)
        if self.store is None:
            return OpenedSession(name, request)
        with ExitStack() as on_error:
            stored, note = self._stored(name)
            on_error.callback(lambda: stored.close())
            away = stored.about is not None
            if away:
                try:
                    request = stored.request(self.model, self._tokenizer)
                except SessionDamaged as error:
                    stored.close()
                    note, away = self._set_aside(name, error), False
                    stored, _ = self._stored(name)
                except SessionVersion:
                    raise
                except SessionError as error:
                    note, away = self._read_anew(name, error), False
            if away and len(stored.about["ids"]) > 1:  # type: ignore[index]
                raise SessionError(
                    f"The session '{name[1]}' holds {len(stored.about['ids'])} texts, and the server continues "  # type: ignore[index]
                    "sessions of one text only; use another name."
                )
            on_error.pop_all()
            return OpenedSession(name, request, stored, away, note)

    def _stored(self, name: Name) -> tuple[StoredSession, str | None]:
        """Return a stored session, open for writing if the disk allows it, and a note if it replaced a damaged one."""
        assert self.store is not None
        key = "/".join(name)
        try:
            return StoredSession(self.store, key, writing=True), None
        except SessionUnwritable:
            with suppress(SessionError):  # there is nothing to read either
                return StoredSession(self.store, key), None
            raise
        except SessionDamaged as error:
            note = self._set_aside(name, error)
            return StoredSession(self.store, key, writing=True), note

    def _set_aside(self, name: Name, error: SessionDamaged) -> str:
        """Rename a damaged session. Answers remain correct without it, because the messages are read again."""
        assert self.store is not None
        try:
            aside = self.store.set_aside("/".join(name))
        except SessionUnwritable:
            raise
        except SessionError:  # its folder is gone
            return self._read_anew(name, error)
        log.warning("%s It is kept as '%s', and the session is read anew.", error, aside)
        return f"The session was damaged and is kept as '{aside.rpartition('/')[2]}'; its text was read anew."

    def _read_anew(self, name: Name, error: SessionError) -> str:
        """Report that a session is not continued, but read anew and then replaced; return a note."""
        log.warning("The session '%s' is read anew: %s", name[1], error)
        return f"Its text was read anew: {self._without_path(name, error)}"

    def _create(self, session: OpenSession) -> StoredSession:
        """Create a stored session for one that began without it."""
        assert self.store is not None and session.name is not None
        stored = StoredSession(self.store, "/".join(session.name), writing=True)
        if stored.about is None:
            return stored
        stored.close()
        with stored.naming("saved"):
            check_version(stored.about)
        raise SessionBusy(
            f"Another program has created the session '{session.name[1]}' in the meantime; use another name."
        )

    def _restore(self, session: OpenSession, cache: KeepCache) -> None:
        assert session.name is not None and session.stored is not None and session.stored.about is not None
        session.away, saved = False, len(session.stored.about["ids"][0])
        try:
            loaded = session.stored.load(self.model, self._tokenizer, cache)
        except SessionDamaged as error:
            session.stored.close()
            try:
                session.note = self._set_aside(session.name, error)
                session.stored, _ = self._stored(session.name)
            except SessionUnwritable as reason:
                session.stored, session.note = None, self._read_anew(session.name, reason)
        except SessionError as error:
            session.note = self._read_anew(session.name, error)
        else:
            session.past = CachedText(loaded.cache, loaded.ids[0] if loaded.ids else ())
            self.restored += 1
            if len(session.past.ids) < saved:  # the log has the reason
                session.note = "A part of its text was missing or damaged in the store, and was read again."

    def _keep(self, session: OpenSession) -> None:
        assert self.store is not None
        self.store.create()
        ids = session.past.ids

        def stop() -> bool:
            return session.wanted or self.ending

        beginnings.keep(self.store.blocks, _space(session), session.cache, ids, stop)

    def _trying(self, what: str, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; if it raises, write a reason to the log that is not there yet, and return
        None: the text is read again."""
        try:
            found = work()
        except Exception as error:
            problem = str(error) if isinstance(error, KvkeepError) else place_of(error)
            if problem != self._problem:
                log.warning("Beginnings %s: %s", what, problem)
            self._problem = problem
            return None
        return found

    def _evict(self) -> None:
        assert self.store is not None
        try:
            if gone := self.store.evict():
                log.warning("%d sessions over the age were removed from the store.", gone)
        except (OSError, KvkeepError) as error:
            log.warning("Blocks and sessions over quota or age are not removed: %s", error)

    def _without_path(self, name: Name, error: Exception) -> str:
        if self.store is None:
            return str(error)
        key, message = "/".join(name), str(error)
        for path in (os.path.realpath(self.store.path(key)), str(self.store.path(key)), key):
            message = message.replace(path, name[1])
        folder = str(self.store.folder)
        return message.replace(f"{folder}{os.sep}", "").replace(f"'{folder}'", f"'{name[1]}'")


def _space(session: OpenSession) -> str:
    """Return the namespace of a session's blocks: that of its owner."""
    return session.owner or LOCAL


def _done(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` now."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
