"""A folder of sessions by name, within a quota of bytes and an age."""

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
"""The problem of a session whose program ended before."""
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
_NAME = re.compile(rf"({_PART}/)?{_PART}")


@dataclass(frozen=True)
class SessionInfo:
    """One session of a store."""

    name: str
    path: str
    """Of its file."""
    bytes: int
    """Of its file."""
    used: float
    """When it was last saved or opened for writing, in seconds since 1970."""
    held: bool
    """Whether a program has it open for writing."""
    problem: str | None = None
    """Why it cannot be read; the fields below then have their defaults."""
    created: float | None = None
    """Seconds since 1970."""
    turns: int = 0
    """How often it was saved."""
    tokens: int = 0
    """In the cache."""
    family: str | None = None
    """Of the model."""
    method: str | None = None
    budget: str | None = None
    mark: str = ""
    """Of the file's last writer."""


def sessions_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of sessions that was named, or this user's."""
    return data_folder() / "sessions" if named is None else Path(named)


class SessionStore:
    """Sessions by name in ``folder``, which is made with the first of them.

    A name is a word of letters, digits, ".", "_" and "-", or two of them, ``owner/name``. quota: bytes of all sessions
    together; age: seconds since a session was used; None: no limit. Both are kept by :meth:`evict`. shared: programs of
    several machines have the folder, whose locks need not reach from one to the other.
    Raises SessionError, and UsageError for a name that cannot be one.
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
        """Return where the session of this name is, or would be."""
        if not _NAME.fullmatch(name) or any(part.endswith((".", SUFFIX)) for part in name.split("/")):
            raise UsageError(
                f"'{name}' cannot be the name of a session: use 1 to 100 of the characters A-Z, a-z, 0-9, '_', '-' and "
                "'.', beginning with a letter, a digit or '_', and not ending with '.' or '.session'; as NAME or "
                "OWNER/NAME."
            )
        return self.folder / f"{name}{SUFFIX}"

    def check_folder(self) -> None:
        """Raise UsageError where no session can be made in the folder, which need not be there yet."""
        folder = self.folder.absolute()
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            reason = "cannot be written" if there.is_dir() else "is not a folder"
            raise UsageError(f"Sessions cannot be saved in '{self.folder}': '{there}' {reason}; name another folder.")
        if self.shared:
            SharedWriter.check_folder(folder)

    def open(self, name: str) -> SessionFile:
        """Return the session, which is made where there is none, open for writing: nobody else can write to it."""
        return SessionFile(self._place(name), writing=True, shared=self.shared)

    def read(self, name: str) -> SessionFile:
        """Return the session as it was last saved, open for reading, whoever writes to it."""
        return SessionFile(self._file(self._existing(name)))

    def sessions(self, owner: str | None = None) -> list[SessionInfo]:
        """Return all sessions, or those of one owner, last used first."""
        found = []
        for path in self._paths(owner):
            with suppress(FileNotFoundError):  # another program removed it
                found.append(self._info(path))
        return sorted(found, key=lambda info: (-info.used, info.name))

    def info(self, name: str) -> SessionInfo:
        """Return what is known about one session."""
        return self._info(self._existing(name))

    def remove(self, name: str) -> None:
        """Remove a session that nobody has open for writing, also one that cannot be read."""
        if not self._removed(self._existing(name)):
            raise SessionBusy(f"The session '{name}' is in use by another program; end that program first.")

    def evict(self) -> list[str]:
        """Remove sessions older than the age, and then the least recently used ones until all are within the quota;
        never one that is open for writing. Return their names."""
        known, now, gone = self._by_use(), time.time(), list[str]()
        total = sum(size for _, size, _ in known)
        for used, size, path in known:
            old = self.age is not None and now - used > self.age
            if old or (self.quota is not None and total > self.quota):
                with suppress(SessionError):  # one that cannot be removed keeps no other one
                    if self._removed(path):
                        total -= size
                        gone.append(self._name(path))
        return gone

    def over_quota(self) -> list[str]:
        """Return the names of the least recently used sessions, open or not, without which the others are within the
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
        """Return when each session was used, its bytes and its path, the least recently used first."""
        known: list[tuple[float, int, Path]] = []
        for path in self._paths():
            with suppress(OSError):  # another program was first
                facts = self._file(path).stat()
                known.append((facts.st_mtime, facts.st_size, path))
        return sorted(known)

    def set_aside(self, name: str) -> str:
        """Rename a session that cannot be read, so that a new one can have its name; return its own."""
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
        """Copy a session, as it was last saved, to a file of its own, every page checked."""
        with self.read(name) as file:
            file.copy(path)

    def add(self, path: str | os.PathLike[str], name: str) -> None:
        """Copy a file with a session into the store, every page checked."""
        with SessionFile(path) as file:
            file.copy(self._place(name))

    def _existing(self, name: str) -> Path:
        path = self.path(name)
        if not self._file(path).is_file():
            raise SessionError(f"There is no session '{name}' in '{self.folder}'; 'kvkeep sessions list' shows them.")
        return path

    def _place(self, name: str) -> Path:
        """Return the path of a session, in a folder that is there."""
        path = self.path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise unwritable(path, error) from error
        return path

    def _file(self, path: Path) -> Path:
        """Return where the file of a session is: at ``path``, or where a writer has left it that was killed while it
        took it (or is about to put it back)."""
        if not self.shared or path.is_file():
            return path
        return next(iter(left_of(path)), path)

    def _paths(self, owner: str | None = None) -> Iterator[Path]:
        """Yield the place of each session, once."""
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
        """Remove a file unless it is open for writing; return whether it is gone. Raises SessionError."""
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
                path.unlink(missing_ok=True)  # damaged, or no session
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
    """Return what is known about the session in a file. Raises OSError where there is none."""
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
