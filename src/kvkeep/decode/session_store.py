"""A folder of named sessions, limited by a quota of bytes and an age."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.decode.journal import open_for_writing, unwritable
from kvkeep.decode.session_file import NAME_OF_IDS, SessionFile
from kvkeep.decode.shared_journal import TAKEN, SharedWriter, forget_taken, left_in, left_of
from kvkeep.errors import SessionBusy, SessionError, SessionUnwritable, UsageError
from kvkeep.models.folders import data_folder

SUFFIX = ".session"
DAY_S = 86400.0
UNSAVED = "its first turn was never saved"
"""The problem of a session whose program ended before the first save."""
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
_NAME = re.compile(rf"({_PART}/)?{_PART}")


@dataclass(frozen=True)
class SessionInfo:
    """One session of a store."""

    name: str
    path: str
    """The path of the session's file."""
    bytes: int
    """Bytes of the session's file."""
    used: float
    """The time of the last save or opening for writing, in seconds since 1970."""
    held: bool
    """Whether a program has it open for writing."""
    problem: str | None = None
    """The reason why it cannot be read; the fields below then have their defaults."""
    created: float | None = None
    """The time of creation, in seconds since 1970."""
    turns: int = 0
    """The number of saves."""
    tokens: int = 0
    """Tokens in the cache."""
    family: str | None = None
    """The model's family."""
    method: str | None = None
    budget: str | None = None
    mark: str = ""
    """The mark of the file's last writer."""


def sessions_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """Return the named folder of sessions, or this user's default."""
    return data_folder() / "sessions" if named is None else Path(named)


class SessionStore:
    """Sessions by name in ``folder``, which is created with the first session.

    A name is a word of letters, digits, ".", "_" and "-", or two of them, ``owner/name``. quota: the maximum bytes of
    all sessions; age: the maximum seconds since a session was used; None: no limit. :meth:`evict` enforces both.
    shared: programs on several machines use the folder; its locks need not reach from one machine to another. Raises
    SessionError, and UsageError for an invalid name.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        quota: int | None = None,
        age: float | None = None,
        shared: bool = False,
    ) -> None:
        self.folder, self.quota, self.age, self.shared = Path(folder), quota, age, shared

    def path(self, name: str) -> Path:
        """Return the path of the session of this name, whether or not it exists."""
        if not _NAME.fullmatch(name) or any(part.endswith((".", SUFFIX)) for part in name.split("/")):
            raise UsageError(
                f"'{name}' cannot be the name of a session: use 1 to 100 of the characters A-Z, a-z, 0-9, '_', '-' and "
                "'.', beginning with a letter, a digit or '_', and not ending with '.' or '.session'; as NAME or "
                "OWNER/NAME."
            )
        return self.folder / f"{name}{SUFFIX}"

    def check_folder(self) -> None:
        """Raise UsageError if no session can be created in the folder. The folder need not exist yet."""
        folder = self.folder.absolute()
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            reason = "cannot be written" if there.is_dir() else "is not a folder"
            raise UsageError(f"Sessions cannot be saved in '{self.folder}': '{there}' {reason}; name another folder.")
        if self.shared:
            SharedWriter.check_folder(folder)

    def open(self, name: str) -> SessionFile:
        """Return the session open for writing; create it if missing. Other programs cannot write to it meanwhile."""
        return SessionFile(self._place(name), writing=True, shared=self.shared)

    def read(self, name: str) -> SessionFile:
        """Return the session as last saved, open for reading; another program may be writing to it."""
        return SessionFile(self._file(self._existing(name)))

    def sessions(self, owner: str | None = None) -> list[SessionInfo]:
        """Return all sessions, or those of one owner; the last used first."""
        found = []
        for path in self._paths(owner):
            with suppress(FileNotFoundError):  # another program removed it
                found.append(self._info(path))
        return sorted(found, key=lambda info: (-info.used, info.name))

    def info(self, name: str) -> SessionInfo:
        """Return the facts about one session."""
        return self._info(self._existing(name))

    def remove(self, name: str) -> None:
        """Remove a session, even one that cannot be read. Raises SessionBusy if a program has it open for writing."""
        if not self._removed(self._existing(name)):
            raise SessionBusy(f"The session '{name}' is in use by another program; end that program first.")

    def evict(self) -> list[str]:
        """Remove sessions older than the age, then the least recently used ones until the rest is within the quota.
        Sessions open for writing remain. Return the names of the removed sessions."""
        known, now, gone = self._by_use(), time.time(), list[str]()
        total = sum(size for _, size, _ in known)
        for used, size, path in known:
            old = self.age is not None and now - used > self.age
            if old or (self.quota is not None and total > self.quota):
                with suppress(SessionError):  # if one cannot be removed, continue with the others
                    if self._removed(path):
                        total -= size
                        gone.append(self._name(path))
        return gone

    def over_quota(self) -> list[str]:
        """Return the names of the least recently used sessions, open or not, whose removal brings the rest within the
        quota."""
        known, gone = self._by_use(), list[str]()
        total = sum(size for _, size, _ in known)
        for _, size, path in known:
            if self.quota is None or total <= self.quota:
                break
            total -= size
            gone.append(self._name(path))
        return gone

    def _by_use(self) -> list[tuple[float, int, Path]]:
        """Return time of use, bytes and path of each session, the least recently used first."""
        known: list[tuple[float, int, Path]] = []
        for path in self._paths():
            with suppress(OSError):  # another program removed it
                facts = self._file(path).stat()
                known.append((facts.st_mtime, facts.st_size, path))
        return sorted(known)

    def set_aside(self, name: str) -> str:
        """Rename a session that cannot be read, so that a new one can use its name; return the new name."""
        path, (owner, slash, word) = self._existing(name), name.rpartition("/")
        for number in itertools.count(1):
            other = f"{owner}{slash}{word[:80]}.damaged-{number}"
            if not self.path(other).exists():
                try:
                    self._file(path).rename(self.path(other))
                except OSError as error:
                    raise unwritable(path, error) from error
                return other
        raise AssertionError

    def export(self, name: str, path: str | os.PathLike[str]) -> None:
        """Copy a session, as last saved, to a new file. Every page is checked."""
        with self.read(name) as file:
            file.copy(path)

    def add(self, path: str | os.PathLike[str], name: str) -> None:
        """Copy a session file into the store. Every page is checked."""
        with SessionFile(path) as file:
            file.copy(self._place(name))

    def _existing(self, name: str) -> Path:
        path = self.path(name)
        if not self._file(path).is_file():
            raise SessionError(f"There is no session '{name}' in '{self.folder}'; 'kvkeep sessions list' shows them.")
        return path

    def _place(self, name: str) -> Path:
        """Return the path of a session; create its folder if missing."""
        path = self.path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise unwritable(path, error) from error
        return path

    def _file(self, path: Path) -> Path:
        """Return the current path of a session's file: ``path``, or the taken file of a writer that was killed (or is
        about to put it back)."""
        if not self.shared or path.is_file():
            return path
        return next(iter(left_of(path)), path)

    def _paths(self, owner: str | None = None) -> Iterator[Path]:
        """Yield the path of each session, once."""
        patterns = [f"*{SUFFIX}", f"*/*{SUFFIX}"] if owner is None else [f"{owner}/*{SUFFIX}"]
        found = [path for pattern in patterns for path in self.folder.glob(pattern)]
        if self.shared:
            folders = [TAKEN, f"*/{TAKEN}"] if owner is None else [f"{owner}/{TAKEN}"]
            taken = [path.parent for pattern in folders for path in self.folder.glob(pattern)]
            found += [place for folder in taken for place, _ in left_in(folder)]
        for path in dict.fromkeys(found):
            name = self._name(path)
            if _NAME.fullmatch(name) and path.suffix == SUFFIX and self._file(path).is_file():
                yield path

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix().removesuffix(SUFFIX)

    def _info(self, path: Path) -> SessionInfo:
        return info_of(self._file(path), self._name(path))

    def _removed(self, path: Path) -> bool:
        """Remove a file unless it is open for writing; return whether it was removed. Raises SessionError."""
        if open_for_writing(self._file(path)):
            return False
        try:
            try:
                with SessionFile(path, writing=True, shared=self.shared) as file:
                    file.remove()
            except SessionBusy:
                return False
            except SessionError:
                if open_for_writing(path):
                    return False
                path.unlink(missing_ok=True)  # damaged, or not a session
        except OSError as error:
            raise SessionUnwritable(
                f"The session '{self._name(path)}' cannot be removed: {(error.strerror or str(error)).lower()}."
            ) from error
        if path.parent != self.folder:
            with suppress(OSError):
                if [*os.listdir(path.parent)] == [TAKEN]:
                    forget_taken(path.parent)
                path.parent.rmdir()
        return True


def info_of(path: Path, name: str) -> SessionInfo:
    """Return the facts about the session in a file. Raises OSError if the file is missing."""
    facts = path.stat()
    common = (name, str(path), facts.st_size, facts.st_mtime, open_for_writing(path))
    try:
        with SessionFile(path) as file:
            if file.about is None:
                return SessionInfo(*common, UNSAVED, mark=file.mark)
            about, ids = file.about, file.stored[NAME_OF_IDS].shape
            family, method, budget = (about[key] for key in ("family", "method", "budget"))
            tokens = ids[0] * ids[1] if len(ids) == 2 else 0
            return SessionInfo(*common, None, file.created, file.turns, tokens, family, method, budget, file.mark)
    except SessionError as error:
        return SessionInfo(*common, str(error))
    except LookupError:
        return SessionInfo(*common, "it is not as kvkeep writes it")
