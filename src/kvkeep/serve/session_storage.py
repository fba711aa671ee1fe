"""The named sessions of a server in its store (:mod:`kvkeep.blocks`).

A named session is open for writing while it is in memory, and each turn is saved when its answer ends. An error of the
store affects only the session, never the engine. Methods that return a Future queue their work; the others work in the
calling thread. One thread opens, restores and saves sessions, and stores texts, in order; a second one reads the
beginnings of prompts (:class:`~kvkeep.serve.beginnings.Beginnings`), which so do not wait for another session's save.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

from kvkeep.blocks.references import check_version
from kvkeep.blocks.sessions import Session, StoredSession, check_savable
from kvkeep.blocks.store import Store
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
from kvkeep.models import fingerprint
from kvkeep.native.threads import begin_thread
from kvkeep.policies.methods import Request
from kvkeep.serve.session import Name, OpenedSession, OpenSession

log = logging.getLogger(__name__)

T = TypeVar("T")


class StoreThread:
    """A thread that does pieces of work in order. Before its start and after its end, work is done at once. wake:
    called after each piece. runs: whether the thread is started, which may raise RuntimeError."""

    def __init__(self, name: str, wake: Callable[[], None], runs: bool) -> None:
        self._thread = ThreadPoolExecutor(1, f"kvkeep-store-{name}") if runs else None
        self._wake, self._futures = wake, list[Future[Any]]()
        if runs:
            self.run(begin_thread).result()

    @property
    def busy(self) -> bool:
        """Whether there is work."""
        return not all(future.done() for future in self._futures)

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do a piece of work. Raises MemoryError if it cannot be queued; it is not done then."""
        if self._thread is None:
            return done(work)
        future = self._thread.submit(work)
        self._futures = [*filter(lambda one: not one.done(), self._futures), future]
        future.add_done_callback(lambda _: self._wake())  # after completion, so that the waking thread finds it done
        return future

    def close(self) -> None:
        """Finish the work."""
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = None


def done(work: Callable[[], T]) -> Future[T]:
    """Do a piece of work now."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


class SessionStorage:
    """Saves and restores sessions. store: the store; without one, or if the model's sessions cannot be saved, nothing
    is saved. wake: called from the threads after each piece of work."""

    def __init__(self, store: Store | None, model: Any, tokenizer: Any, wake: Callable[[], None]) -> None:
        self.model = model
        self.refusal: str | None = None
        """The reason why sessions of this model cannot be saved."""
        if store is not None:
            try:
                check_savable(KeepCache(model, "full"))
            except SessionError as error:
                store, self.refusal = None, str(error)
        self.store = store
        self.counts = dict.fromkeys(("parked", "restored", "saved"), 0)
        """The numbers of sessions that were evicted, restored and saved so far."""
        self.lost_turns: dict[Name, str] = {}
        """Notes on sessions that were evicted from memory without their last turn."""
        self._tokenizer: str | None = None
        if store is not None:
            self._tokenizer = fingerprint.fingerprint_of_tokenizer(tokenizer)
            fingerprint.fix(model)
        self.writer, self.reader = (StoreThread(name, wake, store is not None) for name in ("writer", "reader"))

    @property
    def busy(self) -> bool:
        """Whether the store is being read or written."""
        return self.writer.busy or self.reader.busy

    def open(self, name: Name, options: Mapping[str, Any]) -> Future[OpenedSession]:
        """Open a session. options: KeepCache options of a new one. The future raises SessionError, and as KeepCache."""
        return self.writer.run(lambda: self.naming_session(name, lambda: self._open(name, options)))

    def restore(self, session: OpenSession) -> Future[None]:
        """Read a session's turns into memory that was granted."""
        assert session.name is not None
        name = session.name
        made = done(lambda: KeepCache(self.model, request=session.cache.request))  # its cache may be read meanwhile
        return self.writer.run(lambda: self.naming_session(name, lambda: self._restore(session, made.result())))

    def save(self, session: OpenSession) -> Future[None]:
        """Save a session's last turn; on failure, the session gets a note with the reason."""
        return self.writer.run(lambda: self.write(session))

    def evict(self) -> None:
        """Remove blocks over the quota, and unused sessions and blocks over the age."""
        self.writer.run(self._evict)

    def shutdown(self) -> None:
        """Finish the queued work; later work runs at once."""
        for thread in (self.writer, self.reader):
            thread.close()
        fingerprint.release(self.model)

    def write(self, session: OpenSession) -> None:
        """Save a session's last turn now. If the whole turn was undone, the session continues from the previous one."""
        if self.store is None or not session.cache.get_seq_length():
            return
        try:
            stored = session.stored = session.stored or self._create(session)
            notes = {"model": fingerprint.name_of(self.model)}
            renewed = stored.save(Session(session.cache, [session.past.ids], notes, self._tokenizer))
        except Exception as error:
            assert session.name is not None
            session.followed = isinstance(error, SessionBusy)
            known = self._without_path(session.name, error) if isinstance(error, KvkeepError) else type(error).__name__
            known = "there was not enough memory." if ran_out_of_memory(error) else known
            session.unsaved = f"The last turn is not saved: {known}"
            log.warning("The last turn is not saved: %s", error if isinstance(error, KvkeepError) else place_of(error))
        else:
            session.unsaved = None
            self.counts["saved"] += 1
            if renewed:
                session.note = (
                    "Its stored files were removed or replaced while it was in use; the whole session is saved again."
                )

    def close(self, stored: StoredSession) -> None:
        """Close a session if it is open."""
        try:
            stored.close()
        except OSError as error:
            log.warning("A session cannot be closed: %s", error)

    def naming_session(self, name: Name, work: Callable[[], T]) -> T:
        """Return the result of ``work``; its SessionError names the session instead of a path."""
        try:
            return work()
        except SessionError as error:
            raise type(error)(self._without_path(name, error)) from error

    # -- in the thread --------------------------------------------------------------------------------

    def _open(self, name: Name, options: Mapping[str, Any]) -> OpenedSession:
        """Return the session of this name; it is new if it can neither be opened nor created now."""
        try:
            opened = self._opened(name, options)
        except (SessionUnwritable, SessionVersion) as error:
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
            continues = stored.about is not None
            if continues:
                try:
                    request = stored.request(self.model, self._tokenizer)
                except SessionDamaged as error:
                    stored.close()
                    note, continues = self._set_aside(name, error), False
                    stored, _ = self._stored(name)
                except SessionVersion:
                    raise
                except SessionError as error:
                    note, continues = self._read_anew(name, error), False
            if continues and (texts := len(stored.about["ids"])) > 1:  # type: ignore[index]
                raise SessionError(
                    f"The session '{name[1]}' holds {texts} texts, and the server continues sessions of one text only; "
                    "use another name."
                )
            on_error.pop_all()
            return OpenedSession(name, request, stored, continues, note)

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
        """Create a stored session for one that began without it. Raises SessionError if there is one by now."""
        assert self.store is not None and session.name is not None
        stored = StoredSession(self.store, "/".join(session.name), writing=True)
        if stored.about is None:
            return stored
        stored.close()
        with stored.naming("saved"):
            check_version(stored.about)
        raise SessionBusy(f"The store has another session '{session.name[1]}'; use another name.")

    def _restore(self, session: OpenSession, cache: KeepCache) -> None:
        assert session.name is not None and session.stored is not None and session.stored.about is not None
        saved = len(session.stored.about["ids"][0])
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
            self.counts["restored"] += 1
            if len(session.past.ids) < saved:  # the log has the reason
                session.note = "A part of its text was missing or damaged in the store, and was read again."

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
