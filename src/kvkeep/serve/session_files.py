"""The files of named sessions, read and written by one thread, in order.

A named session has a file of a :class:`~kvkeep.decode.session_store.SessionStore`, open for writing while the session
is in memory; each turn is appended to it when its answer ends. A save takes about as long as a step, and other sessions
do not wait for it. When several servers share the folder, a file is closed whenever its session is idle, so that any
of them can continue it. An error of a file belongs to its session, never to the engine.

Methods that return a Future queue their work; the others work in the calling thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvkeep.cache import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.decode.session import Session, check_savable, load_session, request_of, save_session
from kvkeep.decode.session_file import SessionFile
from kvkeep.decode.session_store import SessionStore
from kvkeep.errors import KvkeepError, SessionBusy, SessionDamaged, SessionError, SessionUnwritable
from kvkeep.models.fingerprint import fingerprint_of_tokenizer
from kvkeep.policies.request import Request
from kvkeep.serve.session import Name, OpenedFile, OpenSession

log = logging.getLogger(__name__)

T = TypeVar("T")


class SessionFiles:
    """Saves and restores sessions. store: where; None, or a model whose sessions cannot be saved: nothing is kept.
    wake: is called from the thread of files after each piece of work."""

    def __init__(self, store: SessionStore | None, model: Any, tokenizer: Any, wake: Callable[[], None]) -> None:
        self.model, self.wake = model, wake
        self.refusal: str | None = None
        """Why sessions of this model cannot be saved."""
        if store is not None:
            try:
                check_savable(KeepCache(model, "full"))
            except SessionError as error:
                store, self.refusal = None, str(error)
        self.store = store
        self.restored = self.saved = 0
        self.lost_turns: dict[Name, str] = {}
        """Notes for sessions that were evicted from memory without their last turn."""
        self._tokenizer = None if store is None else fingerprint_of_tokenizer(tokenizer)
        self._thread = None if store is None else ThreadPoolExecutor(1, "kvkeep-sessions")
        self._futures: list[Future[Any]] = []
        self._close_lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether other servers use the folder, too."""
        return self.store is not None and self.store.shared

    @property
    def busy(self) -> bool:
        """Whether a file is being read or written."""
        return not all(future.done() for future in self._futures)

    def open(self, name: Name, options: Mapping[str, Any]) -> Future[OpenedFile]:
        """Open the file of a session. options: of KeepCache, for a new session. The future raises SessionError, and the
        errors of KeepCache."""
        return self._queue(lambda: self.naming_session(name, lambda: self._open(name, options)))

    def restore(self, session: OpenSession) -> Future[None]:
        """Read the turns of a session into memory, which was granted."""
        assert session.name is not None
        name = session.name
        made = _done(lambda: KeepCache(self.model, request=session.cache.request))  # its own may be read meanwhile
        return self._queue(lambda: self.naming_session(name, lambda: self._restore(session, made.result())))

    def save(self, session: OpenSession) -> Future[None]:
        """Append the last turn of a session to its file; if that fails, the session has a note of why."""
        return self._queue(lambda: self.write(session))

    def close_later(self, session: OpenSession) -> None:
        """Close the file of an idle session, so that other servers can continue it."""
        assert session.file is not None
        session.closing = session.file
        self._queue(partial(self.close, session.file))

    def over_quota(self) -> Future[list[str]]:
        """Find the sessions that are over the folder's quota, as ``owner/name``."""
        return self._queue(self._over_quota)

    def evict(self) -> None:
        """Remove what is over quota or age and not in use."""
        self._queue(self._evict)

    def shutdown(self) -> None:
        """Finish what is queued; later work is done at once."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def write(self, session: OpenSession) -> None:
        """Append the last turn of a session to its file now."""
        cache, file = session.cache, session.file
        if self.store is None:
            session.turns += 1
            return
        if not cache.get_seq_length():  # the whole turn was undone: the session continues from the one before
            session.away = file is not None and file.about is not None
            return
        try:
            file = session.file = self._new_file(session) if file is None else file
            save_session(file, Session(cache, [session.past.ids], tokenizer=self._tokenizer))
        except Exception as error:
            assert session.name is not None
            session.lost = isinstance(error, SessionBusy)
            known = self._without_path(session.name, error) if isinstance(error, KvkeepError) else type(error).__name__
            session.unsaved = f"The last turn is not saved: {known}"
            log.warning("The last turn is not saved: %s", error)
        else:
            session.unsaved, session.turns = None, file.turns
            self.saved += 1
            if self.shared:  # before the client is answered: its next request may reach another server
                self.close(file)

    def close(self, file: SessionFile) -> None:
        """Close a file, if it is open."""
        try:
            with self._close_lock:
                file.close()
        except OSError as error:
            log.warning("A session's file cannot be closed: %s", error)

    def naming_session(self, name: Name, work: Callable[[], T]) -> T:
        """Return what ``work`` returns; its SessionError names the session, not the path of its file."""
        try:
            return work()
        except SessionError as error:
            raise type(error)(self._without_path(name, error)) from error

    def _without_path(self, name: Name, error: Exception) -> str:
        if self.store is None:
            return str(error)
        key, message = "/".join(name), str(error)
        for path in (os.path.realpath(self.store.path(key)), str(self.store.path(key)), key):
            message = message.replace(path, name[1])
        return message

    # -- in the thread of files -----------------------------------------------------------------------

    def _queue(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            return _done(work)
        future = self._thread.submit(work)
        self._futures = [*filter(lambda one: not one.done(), self._futures), future]
        future.add_done_callback(lambda _: self.wake())  # after it is done: nobody waits for what has been
        return future

    def _open(self, name: Name, options: Mapping[str, Any]) -> OpenedFile:
        """Return the session of this name; a new one also if no file can be made for it now."""
        try:
            opened = self._opened(name, options)
        except SessionUnwritable:
            if self.store is None or self.store.path("/".join(name)).exists():
                raise
            opened = OpenedFile(name, Request.parse(**options))
        return replace(opened, note=opened.note or self.lost_turns.pop(name, None))

    def _opened(self, name: Name, options: Mapping[str, Any]) -> OpenedFile:
        request = Request.parse(**options)
        if self.store is None:
            return OpenedFile(name, request)
        with ExitStack() as on_error:
            file, note = self._file(name)
            on_error.callback(file.close)
            away = file.about is not None
            try:
                request = request_of(file, self.model, self._tokenizer) if away else request
            except SessionDamaged as error:
                file.close()
                note, away = self._set_aside(name, error), False
                file, _ = self._file(name)
            on_error.pop_all()
            return OpenedFile(name, request, file, away, note)

    def _file(self, name: Name) -> tuple[SessionFile, str | None]:
        """Return the file of a session, open for writing, and a note if a damaged one was replaced."""
        assert self.store is not None
        key = "/".join(name)
        try:
            return self.store.open(key), None
        except SessionDamaged as error:
            note = self._set_aside(name, error)
            return self.store.open(key), note

    def _set_aside(self, name: Name, error: SessionDamaged) -> str:
        """Rename a damaged file: without it answers are still right, as the messages are read again."""
        assert self.store is not None
        aside = self.store.set_aside("/".join(name))
        log.warning("%s It is kept as '%s', and the session is read anew.", error, aside)
        return f"The file was damaged and is kept as '{aside.rpartition('/')[2]}'; the session was read anew."

    def _new_file(self, session: OpenSession) -> SessionFile:
        """Return a file for a session that began without one."""
        assert self.store is not None and session.name is not None
        file = self.store.open("/".join(session.name))
        if file.about is None:
            return file
        file.close()
        raise SessionBusy(
            f"Another program has created the session '{session.name[1]}' in the meantime; use another name."
        )

    def _restore(self, session: OpenSession, cache: KeepCache) -> None:
        assert session.name is not None and session.file is not None
        try:
            saved = load_session(session.file, self.model, self._tokenizer, cache)
        except SessionDamaged as error:
            session.file.close()
            session.note = self._set_aside(session.name, error)
            session.file, _ = self._file(session.name)
            session.away, session.turns = False, 0
            return
        if saved.cache.rows > 1:
            raise SessionError(
                f"The session '{session.name[1]}' holds {saved.cache.rows} texts, and the server continues "
                "sessions of one text only; use another name."
            )
        session.past, session.away = CachedText(saved.cache, saved.ids[0] if saved.ids else ()), False
        self.restored += 1

    def _over_quota(self) -> list[str]:
        assert self.store is not None
        try:
            return self.store.over_quota()
        except OSError as error:
            log.warning("The folder of sessions cannot be read: %s", error)
            return []

    def _evict(self) -> None:
        assert self.store is not None
        try:
            if gone := self.store.evict():
                log.warning("%d sessions over quota or age were removed from the folder.", len(gone))
        except (OSError, KvkeepError) as error:
            log.warning("Sessions over quota or age are not removed: %s", error)


def _done(work: Callable[[], T]) -> Future[T]:
    """Do ``work`` now."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
