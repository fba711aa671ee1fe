"""Sessions of an engine: those in memory, those parked in their files, and the ways between.

A named session has a file of a :class:`~kvkeep.decode.session_store.SessionStore`. It is open for writing while the
session is in memory, and each turn is appended to it when its answer ends. So to make way is to close the file and to
let the cache go; the next answer restores it, to the same entries. Files are read and written by a thread of their own,
one after the other: a turn's save takes about as long as a step, which others do not wait for. Caches are made by the
engine's thread, as a method may run the model for it (``h2o-fisher`` and ``duo-attention`` measure it, once).

Where several servers share the folder, a session's file is closed whenever nobody is answered, so that any of them can
go on with it. What is in memory counts as long as nobody else has written to the file.

The engine's thread calls the methods, but for ``by_name`` and ``check_name``, which any thread may. What they queue is
done in the thread of files. ``park`` saves and closes in the engine's thread, where nothing is queued of the session
but the close of its file. What a file fails by is its session's, and never the engine's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from kvkeep.cache import KeepCache
from kvkeep.decode.past import Past
from kvkeep.decode.session import Session as Saved
from kvkeep.decode.session import check_savable, load_session, naming, request_of, save_session
from kvkeep.decode.session_file import SessionFile
from kvkeep.decode.session_store import SessionStore
from kvkeep.errors import KvkeepError, SessionBusy, SessionDamaged, SessionError, SessionUnwritable, UsageError
from kvkeep.models.fingerprint import fingerprint_of_tokenizer
from kvkeep.models.freed import give_back
from kvkeep.policies.request import Request
from kvkeep.serve.arbiter import held, most, restoring, shared

log = logging.getLogger(__name__)

Name = tuple[str, str]
"""Owner and name of a session."""
TIDY = 2**25
"""Bytes freed after which memory is given back to the system: 12 ms of every second in which a prompt is read."""
EVERY_S = 60.0
"""Seconds between two looks at quota and age."""

T = TypeVar("T")


@dataclass(eq=False)
class Session:
    """A conversation's cache, and what it has read. name: None for one whose owner does not name it. file: where its
    turns are kept; away: they are not in memory yet. busy: an answer is being written, or a file read or written.
    turns: answers so far. note: what its owner should know."""

    name: Name | None
    past: Past
    owner: str = ""
    file: SessionFile | None = None
    away: bool = False
    busy: bool = False
    turns: int = 0
    note: str | None = None
    unsaved: str | None = None  # why the last turn is not in its file; it is tried again with each turn
    lost: bool = False  # another program goes on with it
    closing: SessionFile | None = None  # its file, from when its close is queued
    used: float = field(default_factory=time.time)
    _counted: tuple[int, Mapping[int, int]] | None = None

    @property
    def cache(self) -> KeepCache:
        """Its cache."""
        assert isinstance(self.past.cache, KeepCache)
        return self.past.cache

    @property
    def key(self) -> Name:
        """What it is known by as long as it is in memory; nobody can ask for it without a name."""
        return self.name or ("", f"#{id(self)}")

    def align(self, prompt: Sequence[int]) -> None:
        """Let its cache hold no more than what ``prompt`` begins with; a lossy one that holds more, nothing."""
        self.past.align(prompt, crops=self.cache.exactness == "exact")

    def most(self, tokens: int) -> int:
        """Return the bytes that it can come to hold until it has read ``tokens`` tokens, restoring it included."""
        back = restoring(self.file, self.cache) if self.away and self.file is not None else 0
        return max(most(self.cache, tokens), back)

    @property
    def counted(self) -> tuple[int, Mapping[int, int]]:
        """The bytes that it holds, and the parts of that which others may hold too, by where they are; counted once
        as long as it is idle."""
        if self._counted is None or self.busy:
            self._counted = self.held, shared(self.cache)
        return self._counted

    @property
    def held(self) -> int:
        """The bytes that it holds now."""
        return held(self.cache)


@dataclass(frozen=True)
class Opened:
    """A session whose cache is to be made. file: open for writing; None: it has none. away: there are turns in it."""

    name: Name
    request: Request
    file: SessionFile | None = None
    away: bool = False
    note: str | None = None

    def session(self, model: Any) -> Session:
        """Return it with an empty cache. Raises what KeepCache raises, and then lets its file go."""
        with ExitStack() as unless:
            if self.file is not None:
                unless.callback(self.file.close)
            with naming(self.file) if self.away and self.file is not None else nullcontext():
                cache = KeepCache(model, request=self.request)
            unless.pop_all()
        turns = 0 if self.file is None else self.file.turns
        return Session(self.name, Past(cache), self.name[0], self.file, self.away, turns=turns, note=self.note)


class Sessions:
    """Sessions by name. store: where they are kept; None: those that make way are forgotten. wake: is called, in
    another thread, when a file was read or written.

    memory: those in memory, the least recently used first. refusal: why none can be saved. parked, restored, saved:
    how often.
    """

    def __init__(self, model: Any, tokenizer: Any, store: SessionStore | None, wake: Callable[[], None]) -> None:
        self.model, self.wake = model, wake
        self.memory: OrderedDict[Name, Session] = OrderedDict()
        self.refusal: str | None = None
        self.parked = self.restored = self.saved = 0
        if store is not None:
            try:
                check_savable(KeepCache(model, "full"))
            except SessionError as error:
                store, self.refusal = None, str(error)
        self.store = store
        self._tokenizer = None if store is None else fingerprint_of_tokenizer(tokenizer)
        self._files = None if store is None else ThreadPoolExecutor(1, "kvkeep-sessions")
        self._futures: list[Future[Any]] = []
        self._one_closes = threading.Lock()
        self._gone: dict[Name, str] = {}  # what those in files should know that made way without their last turn
        self._looked = 0.0
        self.freed = 0  # bytes, of what is parked and of buffers that grew
        self._over: Future[list[str]] | None = None  # what is over the folder's quota, as long as it is looked at

    @staticmethod
    def check_name(name: Name) -> None:
        """Raise UsageError unless a session can be called so."""
        try:
            SessionStore("").path("/".join(name))
        except UsageError as error:
            raise UsageError(
                f"'{name[1]}' cannot be the name of a session: up to 100 letters, digits, '.', '_' and '-' make one."
            ) from error

    @property
    def _shared(self) -> bool:
        """Whether other servers have the folder, too."""
        return self.store is not None and self.store.shared

    # -- in memory ------------------------------------------------------------------------------------

    def idle(self) -> list[Session]:
        """Return those that can make way: such without a name, which nobody may ask for again, and then the least
        recently used first; last those with a turn that is nowhere else."""
        idle = [one for one in self.memory.values() if not one.busy]
        return sorted(idle, key=lambda one: (one.unsaved is not None, one.name is not None))

    def touch(self, session: Session) -> None:
        """Let a session, which is answering now, be the last to make way."""
        session.busy = True
        self.memory[session.key] = session
        self.use(session)

    def use(self, session: Session) -> None:
        """Let a session be the last to make way of those in memory."""
        session.used, session._counted = time.time(), None
        if session.key in self.memory:
            self.memory.move_to_end(session.key)

    def leave(self, session: Session, stay: bool = True) -> None:
        """Let a session that does not answer any more be idle; one that has read nothing is none."""
        session.busy, session._counted, file = False, None, session.file
        if not (stay and (session.away or session.past.cache.get_seq_length())):
            self.park(session)
        elif self._shared and file is not None and session.unsaved is None and self.is_open(session):
            session.closing = file
            self._do(partial(self._close, file))

    def park(self, session: Session) -> None:
        """Let go of a session's memory; its turns are in its file, if it has one. A save that failed is tried again,
        and waited for."""
        if session.unsaved is not None and not session.lost:
            self._saved(session)
            if session.unsaved is not None:
                log.warning("A session lets go of its memory without its last turn.")
                if session.file is not None and session.file.about is not None:  # else all of it is forgotten
                    self._gone[session.key] = f"{session.unsaved} It was lost when the session made way."
        self.memory.pop(session.key, None)
        self.freed += session.counted[0]
        if session.file is not None:
            self.parked += not session.away
            self._close(session.file)

    def drop(self, name: Name) -> bool:
        """Let a session go whose file is to be removed; return whether it was in memory. Raises SessionBusy."""
        session = self.memory.get(name)
        self._gone.pop(name, None)
        if session is None:
            return False
        if session.busy:
            raise SessionBusy(f"The session '{name[1]}' is answering; ask again when it has.")
        session.unsaved = None  # its last turn goes, too
        self.park(session)
        return True

    def facts(self, owner: str, name: str | None = None, marks: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return what is known of the owner's sessions in memory, or of one of them, by name, and notes of those that
        made way. marks: of the last writers of their files, where other servers write to the folder, too: what is in
        memory and in its file counts only as this server has written it, and makes way where the file is gone."""
        own = {each[1]: one for each, one in self.memory.items() if each[0] == owner and name in (None, each[1])}
        if marks is not None:
            for each, one in [*own.items()]:
                if not one.busy and one.unsaved is None and one.file is not None and one.file.mark != marks.get(each):
                    del own[each]
                    if each not in marks:
                        self.park(one)
        gone = {each[1]: {"note": note} for each, note in [*self._gone.items()] if each[0] == owner}
        return gone | {each: _facts(one) for each, one in own.items()}

    # -- files ----------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether a file is being read or written."""
        return not all(future.done() for future in self._futures)

    def open(self, name: Name, kind: Mapping[str, Any]) -> Future[Callable[[], Session]]:
        """Open the file of the session of this name; what the future returns makes the session, in the engine's thread,
        its cache empty as long as its turns are away. kind: what it is if it is new, as KeepCache takes it. Both raise
        SessionError, and what KeepCache raises."""

        def opened() -> Callable[[], Session]:
            found = self.by_name(name, lambda: self._begun(name, kind))
            return lambda: self.by_name(name, lambda: self._known(found) or found.session(self.model))

        return self._do(opened)

    def is_open(self, session: Session) -> bool:
        """Return whether a session that is in memory is this server's alone, and goes on to be."""
        return session.file is None or not (session.file.closed or session.file is session.closing)

    def _known(self, found: Opened) -> Session | None:
        """Return the session as it is in memory, None unless that is what is in its file."""
        session = self.memory.get(found.name)
        if session is None:
            return None
        if session.file is not None and found.file is not None and found.file.follows(session.file):
            session.file = found.file
            return session
        self.park(session)
        return None

    def restore(self, session: Session) -> Future[None]:
        """Read a session's turns into memory, which was granted."""
        assert session.name is not None
        name = session.name
        made = _now(lambda: KeepCache(self.model, request=session.cache.request))  # the session's own may be looked at
        return self._do(lambda: self.by_name(name, lambda: self._restored(session, made.result())))

    def save(self, session: Session) -> Future[None]:
        """Append what is new of a session to its file; where that fails, the session has a note of why."""
        return self._do(lambda: self._saved(session))

    def look(self) -> None:
        """Keep quota and age, now and then: what is over them and idle is parked, and removed from the folder, which is
        looked through in the thread of files. What has no file is not of the folder, and stays."""
        store = self.store
        if store is None or (store.quota is None and store.age is None):
            return
        if self._over is None and time.monotonic() - self._looked >= EVERY_S:
            self._over = self._do(self._over_quota)
        if self._over is None or not self._over.done():
            return
        over, self._over, self._looked = self._over.result(), None, time.monotonic()
        for session in self.idle():
            old = store.age is not None and time.time() - session.used > store.age
            if session.file is not None and (old or "/".join(session.key) in over):
                self.park(session)
        self._do(self._evicted)

    def tidy(self) -> None:
        """Give freed memory back to the system, now and then: parts in use lie between it, so that by itself the
        process would grow (16 prompts of 2,048 tokens in ``full``: 400 to 550 MB more)."""
        if self.freed > TIDY:
            self.freed = 0
            give_back()

    def close(self) -> None:
        """Finish what is under way, and close all files."""
        if self._files is not None:
            self._files.shutdown()
            self._files = None  # what comes later is done at once
        for session in [*self.memory.values()]:
            self.park(session)

    def _do(self, work: Callable[[], T]) -> Future[T]:
        if self._files is None:
            return _now(work)
        future = self._files.submit(work)
        self._futures = [*filter(lambda one: not one.done(), self._futures), future]
        future.add_done_callback(lambda _: self.wake())  # after it is done: nobody waits for what has been
        return future

    # -- in the thread of files -----------------------------------------------------------------------

    def by_name(self, name: Name, work: Callable[[], T]) -> T:
        """Do ``work``; an error says which session it is by its name, as its owner knows no folder here."""
        try:
            return work()
        except SessionError as error:
            raise type(error)(self._without_path(name, error)) from error

    def _without_path(self, name: Name, error: Exception) -> str:
        if self.store is None:
            return str(error)
        key, said = "/".join(name), str(error)
        for path in (os.path.realpath(self.store.path(key)), str(self.store.path(key)), key):
            said = said.replace(path, name[1])
        return said

    def _begun(self, name: Name, kind: Mapping[str, Any]) -> Opened:
        """Return the session of this name; a new one also where no file can be made for it now."""
        try:
            opened = self._opened(name, kind)
        except SessionUnwritable:
            if self.store is None or self.store.path("/".join(name)).exists():
                raise
            opened = Opened(name, Request.parse(**kind))
        return replace(opened, note=opened.note or self._gone.pop(name, None))

    def _opened(self, name: Name, kind: Mapping[str, Any]) -> Opened:
        request = Request.parse(**kind)
        if self.store is None:
            return Opened(name, request)
        with ExitStack() as unless:
            file, note = self._file(name)
            unless.callback(file.close)
            away = file.about is not None
            try:
                request = request_of(file, self.model, self._tokenizer) if away else request
            except SessionDamaged as error:
                file.close()
                note, away = self._set_aside(name, error), False
                file, _ = self._file(name)
            unless.pop_all()
            return Opened(name, request, file, away, note)

    def _file(self, name: Name) -> tuple[SessionFile, str | None]:
        """Return the file of a session, open for writing, and a note if it had to be made anew."""
        assert self.store is not None
        key = "/".join(name)
        try:
            return self.store.open(key), None
        except SessionDamaged as error:
            note = self._set_aside(name, error)
            return self.store.open(key), note

    def _set_aside(self, name: Name, error: SessionDamaged) -> str:
        """Make room for a new file: an answer is right without the old one, if its messages are read again."""
        assert self.store is not None
        aside = self.store.set_aside("/".join(name))
        log.warning("%s It is kept as '%s', and the session is read anew.", error, aside)
        return f"The file was damaged and is kept as '{aside.rpartition('/')[2]}'; the session was read anew."

    def _restored(self, session: Session, cache: KeepCache) -> None:
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
            raise SessionError(f"The session '{session.name[1]}' is of {saved.cache.rows} texts; name another.")
        session.past, session.away = Past(saved.cache, saved.ids[0] if saved.ids else ()), False
        self.restored += 1

    def _over_quota(self) -> list[str]:
        assert self.store is not None
        try:
            return self.store.over_quota()
        except OSError as error:
            log.warning("The folder of sessions cannot be looked through: %s", error)
            return []

    def _evicted(self) -> None:
        assert self.store is not None
        try:
            if gone := self.store.evict():
                log.warning("%d sessions over quota or age were removed from the folder.", len(gone))
        except (OSError, KvkeepError) as error:
            log.warning("Sessions over quota or age are not removed: %s", error)

    def _made(self, session: Session) -> SessionFile:
        """Return a file for a session that began without one."""
        assert self.store is not None and session.name is not None
        file = self.store.open("/".join(session.name))
        if file.about is None:
            return file
        file.close()
        raise SessionBusy(f"Another program has begun the session '{session.name[1]}' meanwhile.")

    def _saved(self, session: Session) -> None:
        cache, file = session.cache, session.file
        if self.store is None:
            session.turns += 1
            return
        if not cache.get_seq_length():  # undone as a whole: it goes on from the turn before
            session.away = file is not None and file.about is not None
            return
        try:
            file = session.file = self._made(session) if file is None else file
            save_session(file, Saved(cache, [session.past.ids], tokenizer=self._tokenizer))
        except Exception as error:
            assert session.name is not None
            session.lost = isinstance(error, SessionBusy)
            known = self._without_path(session.name, error) if isinstance(error, KvkeepError) else type(error).__name__
            session.unsaved = f"The last turn is not saved: {known}"
            log.warning("The last turn is not saved: %s", error)
        else:
            session.unsaved, session.turns = None, file.turns
            self.saved += 1
            if self._shared:  # before anybody is told: whoever asks next may ask another server
                self._close(file)

    def _close(self, file: SessionFile) -> None:
        """Close a file, unless it is closed; from the engine's thread, too."""
        try:
            with self._one_closes:
                file.close()
        except OSError as error:
            log.warning("A session's file cannot be closed: %s", error)


def _now(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def _facts(session: Session) -> dict[str, Any]:
    cache = session.cache
    return {
        "state": "answering" if session.busy else "parked" if session.away else "idle",
        "tokens": len(session.past.ids),
        "turns": session.turns,
        "method": cache.method.name,
        "budget": None if cache.request.budget is None else str(cache.request.budget),
        "memory_bytes": session.held,
        "used": session.used,
        "note": session.unsaved or session.note,
    }
