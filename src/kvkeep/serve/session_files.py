"""The files of named sessions. One thread reads and writes them, in order.

A named session has a file in a :class:`~kvkeep.decode.session_store.SessionStore`. The file is open for writing while
the session is in memory, and each turn is appended when its answer ends. A save takes about as long as a step; other
sessions do not wait for it. If several servers share the folder, a file is closed whenever its session is idle, so that
any server can continue it. An error of a file affects only its session, never the engine.

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
    """Saves and restores sessions. store: the session store; without one, or if the model's sessions cannot be saved,
    nothing is saved. wake: called from the file thread after each piece of work."""

    def __init__(self, store: SessionStore | None, model: Any, tokenizer: Any, wake: Callable[[], None]) -> None:
        self.model, self.wake = model, wake
        self.refusal: str | None = None
        """The reason why sessions of this model cannot be saved."""
        if store is not None:
            try:
                check_savable(KeepCache(model, "full"))
            except SessionError as error:
                store, self.refusal = None, str(error)
        self.store = store
        self.restored = self.saved = 0
        self.lost_turns: dict[Name, str] = {}
        """Notes on sessions that were evicted from memory without their last turn."""
        self._tokenizer = None if store is None else fingerprint_of_tokenizer(tokenizer)
        self._thread = None if store is None else ThreadPoolExecutor(1, "kvkeep-sessions")
        self._futures: list[Future[Any]] = []
        self._close_lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether other servers also use the folder."""
        return self.store is not None and self.store.shared

    @property
    def busy(self) -> bool:
        """Whether a file is being read or written."""
        return not all(future.done() for future in self._futures)

    def open(self, name: Name, options: Mapping[str, Any]) -> Future[OpenedFile]:
        """Open the file of a session. options: KeepCache options of a new session. The future raises SessionError, and
        the errors of KeepCache."""
        return self._queue(lambda: self.naming_session(name, lambda: self._open(name, options)))

    def restore(self, session: OpenSession) -> Future[None]:
        """Read a session's turns into memory that was granted."""
        assert session.name is not None
        name = session.name
        made = _done(lambda: KeepCache(self.model, request=session.cache.request))  # its cache may be read meanwhile
        return self._queue(lambda: self.naming_session(name, lambda: self._restore(session, made.result())))

    def save(self, session: OpenSession) -> Future[None]:
        """Append a session's last turn to its file; on failure, the session gets a note with the reason."""
        return self._queue(lambda: self.write(session))

    def close_later(self, session: OpenSession) -> None:
        """Close the file of an idle session, so that other servers can continue it."""
        assert session.file is not None
        session.closing = session.file
        self._queue(partial(self.close, session.file))

    def over_quota(self) -> Future[list[str]]:
        """Find the sessions over the folder's quota, as ``owner/name``."""
        return self._queue(self._over_quota)

    def evict(self) -> None:
        """Remove unused sessions that are over quota or age."""
        self._queue(self._evict)

    def shutdown(self) -> None:
        """Finish the queued work; later work runs at once."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def write(self, session: OpenSession) -> None:
        """Append a session's last turn to its file now."""
        cache, file = session.cache, session.file
        if self.store is None:
            session.turns += 1
            return
        if not cache.get_seq_length():  # the whole turn was undone: the session continues from the previous one
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
            if self.shared:  # before the client gets its answer: its next request may reach another server
                self.close(file)

    def close(self, file: SessionFile) -> None:
        """Close a file if it is open."""
        try:
            with self._close_lock:
                file.close()
        except OSError as error:
            log.warning("A session's file cannot be closed: %s", error)

    def naming_session(self, name: Name, work: Callable[[], T]) -> T:
        """Return the result of ``work``; its SessionError names the session instead of the file's path."""
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

    # -- in the file thread ---------------------------------------------------------------------------

    def _queue(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            return _done(work)
        future = self._thread.submit(work)
        self._futures = [*filter(lambda one: not one.done(), self._futures), future]
        future.add_done_callback(lambda _: self.wake())  # after completion, so that the waking thread finds it done
        return future

    def _open(self, name: Name, options: Mapping[str, Any]) -> OpenedFile:
        """Return the session of this name. A new session is returned even if its file cannot be created now."""
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
        """Return the file of a session, open for writing, and a note if it replaced a damaged file."""
        assert self.store is not None
        key = "/".join(name)
        try:
            return self.store.open(key), None
        except SessionDamaged as error:
            note = self._set_aside(name, error)
            return self.store.open(key), note

    def _set_aside(self, name: Name, error: SessionDamaged) -> str:
        """Rename a damaged file. Answers remain correct without it, because the messages are read again."""
        assert self.store is not None
        aside = self.store.set_aside("/".join(name))
        log.warning("%s It is kept as '%s', and the session is read anew.", error, aside)
        return f"The file was damaged and is kept as '{aside.rpartition('/')[2]}'; the session was read anew."

    def _new_file(self, session: OpenSession) -> SessionFile:
        """Create a file for a session that began without one."""
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
    """Run ``work`` now."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
