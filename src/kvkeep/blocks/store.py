"""The store: a folder with blocks and with the references of sessions.

FOLDER/kvkeep-store                   the version of the format
FOLDER/blocks/OWNER/…                 blocks (kvkeep.blocks.folder)
FOLDER/records/OWNER/…                what a server answered (kvkeep.blocks.records)
FOLDER/sessions/OWNER/NAME.session/   references (kvkeep.blocks.references); without OWNER for the command line

The folder may be removed or replaced while programs use it. So a program looks for the version before it writes.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.blocks.folder import LOCK, BlockFolder, BlockName
from kvkeep.blocks.records import Records
from kvkeep.blocks.references import Reference, SessionFiles, checked, newest, unwritable
from kvkeep.blocks.text import MESSAGE, STATE, TAIL, belongs_to_sessions, key_after
from kvkeep.errors import (
    NoStore,
    SessionBusy,
    SessionError,
    SessionUnwritable,
    SessionVersion,
    UsageError,
    reason_of,
)
from kvkeep.files import (
    check_kind,
    close_to_others,
    is_file,
    is_folder,
    is_temporary,
    make_folder,
    read_file,
    remove_abandoned,
    write_whole,
)
from kvkeep.models.folders import data_folder

log = logging.getLogger(__name__)

MARKER = "kvkeep-store"
"""The name of the file with the version of the format."""
VERSION = 1
FOLDERS = ("blocks", "sessions", "records")
"""The names of the folders in a store."""
_OF_DISKS = "lost+found"
"""The name of a folder that the root of a disk has."""
SUFFIX = ".session"
QUOTA = 2 * 10**9
"""Bytes of all blocks, unless the user names another quota."""
DAY_S = 86400.0
LOCAL = "_"
"""The namespace of blocks of sessions without an owner; no owner can have this name."""
LOCAL_OWNER = "local"
"""The owner of all sessions and texts of a server without keys."""
ONLY = "session"
"""The name of the session in a store that holds one only: a session at a path."""
ABANDONED_S = 3600.0
"""Seconds after which a session's block that no session names is taken as left behind by a killed program."""
UNSAVED = "its first turn was never saved"
"""The problem of a session whose program ended before the first save."""
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(?<!\.)(?<!\.session)"
_NAME = re.compile(rf"((?!{LOCAL}/){_PART}/)?{_PART}")


@dataclass(frozen=True)
class SessionInfo:
    """One session of a store."""

    name: str
    path: str
    """The path of the session's folder."""
    bytes: int
    """Bytes of the session's blocks; other sessions may share them."""
    used: float
    """The time of the last save or opening for writing, in seconds since 1970."""
    in_use: bool
    """Whether a program has it open for writing."""
    problem: str | None = None
    """The reason why it cannot be read; the fields below then have their defaults."""
    other_version: bool = False
    """Whether it cannot be read because another version of kvkeep has saved it."""
    created: float | None = None
    """The time of creation, in seconds since 1970."""
    saves: int = 0
    """The number of saves."""
    tokens: int = 0
    """Tokens in the cache."""
    missing: int = 0
    """The number of blocks that the store does not have any more; their text will be read again."""
    model: str | None = None
    """The model's name, or its family where nobody has noted the name."""
    method: str | None = None
    budget: str | None = None


def store_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """Return the named folder of a store, or this user's default."""
    return data_folder() / "store" if named is None else Path(named)


def user_store(named: str | None = None) -> Store:
    """Return the store in the named folder, without a quota, or this user's default store."""
    return Store(store_folder(named), quota=QUOTA if named is None else None)


class Store:
    """A store in ``folder``, which is created with the first block or session.

    A session's name is a word of letters, digits, ".", "_" and "-", or two of them, ``owner/name``. An owner's blocks
    are used for this owner only. quota: the maximum bytes of all blocks; age: the maximum seconds since a block or a
    session was used; None: no limit. A store that is elsewhere is a subclass with its own :attr:`blocks`,
    :meth:`files` and :meth:`_names`. Raises NoStore for a folder that is not a store, and UsageError for an invalid
    name.
    """

    def __init__(self, folder: str | os.PathLike[str], *, quota: int | None = QUOTA, age: float | None = None) -> None:
        self.folder, self.age = Path(folder), age
        self.blocks = BlockFolder(self.folder / "blocks", quota)
        self.records = Records(self.folder / "records")
        self._sessions: Any = self.folder / "sessions"

    # -- the folder ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise NoStore unless the folder is a store of this version, or a new one can be created there."""
        if "\0" in str(self.folder):
            raise NoStore("A path cannot have a NUL character; name another folder.")
        try:
            for name in FOLDERS:
                check_kind(self.folder / name, "a folder")
            if not (there := self._nearest()).is_dir():
                raise NoStore(
                    f"Nothing can be saved in '{self.folder}': '{there}' is a file, not a folder of kvkeep; name "
                    "another."
                )
            found = {*os.listdir(self.folder)} if there == self.folder.absolute() else set[str]()
            if MARKER in found:
                self._check_version()
            elif any(not is_temporary(name) for name in found - {*FOLDERS, _OF_DISKS}):
                raise NoStore(f"'{self.folder}' is not a folder of kvkeep: it holds other files; name another.")
        except OSError as error:
            raise NoStore(f"The folder '{self.folder}' cannot be read: {reason_of(error)}.") from error

    def _check_version(self) -> None:
        version = read_file(self.folder / MARKER, 1000).decode(errors="replace").strip()
        if version != str(VERSION):
            raise NoStore(
                f"'{self.folder}' is of another version of kvkeep ({version[:20]}; this one reads {VERSION}); name "
                "another folder."
            )
        if opened := close_to_others(self.folder):
            log.warning("The folder '%s' %s.", self.folder, opened)

    def _nearest(self) -> Path:
        """Return the folder, or the nearest one above it that exists."""
        folder = self.folder.absolute()
        return next(path for path in (folder, *folder.parents) if os.path.exists(path))

    def check_writable(self) -> None:
        """Raise NoStore if nothing can be saved in the folder."""
        self.check()
        if not os.access(there := self._nearest(), os.W_OK | os.X_OK):
            raise NoStore(f"Nothing can be saved in '{self.folder}': '{there}' cannot be written; name another.")

    def create(self) -> None:
        """Create the folder if it is missing. Raises NoStore as :meth:`check`, and SessionUnwritable."""
        self.check()
        try:
            if not is_file(self.folder / MARKER):
                make_folder(self.folder)
                close_to_others(self.folder)
                write_whole(self.folder / MARKER, lambda file: file.write(f"{VERSION}\n".encode()))
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def remove_empty(self) -> None:
        """Remove the folder if it has no session and no block."""
        with suppress(OSError):
            self._sessions.rmdir()
            (self.blocks.folder / LOCK).unlink(missing_ok=True)
            for folder, _, _ in os.walk(self.blocks.folder, topdown=False):
                os.rmdir(folder)
            (self.folder / MARKER).unlink()
            self.folder.rmdir()

    # -- sessions -----------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Return the path of the session of this name, whether or not it exists."""
        if not _NAME.fullmatch(name):
            shown = name if len(name) < 120 else f"{name[:100]}…"
            raise UsageError(
                f"'{shown}' cannot be the name of a session: use 1 to 100 of the characters A-Z, a-z, 0-9, '_', '-' "
                "and '.', beginning with a letter, a digit or '_', and not ending with '.' or '.session'; as NAME or "
                "OWNER/NAME."
            )
        return self._sessions / f"{name}{SUFFIX}"

    def files(self, name: str) -> SessionFiles:
        """Return the files of the session of this name, whether or not it exists."""
        return SessionFiles(self.path(name), self.folder)

    def place(self, name: str, writing: bool) -> SessionFiles:
        """Return the files of a session to be opened. Raises SessionError if it has to exist and does not."""
        if not writing:
            return self._existing(name)
        files = self.files(name)
        self.create()
        return files

    def open(self, name: str) -> Reference:
        """Return the session open for writing; create it if missing."""
        return Reference(self.place(name, writing=True), writing=True)

    def read(self, name: str) -> Reference:
        """Return the session as last saved; another program may be writing to it."""
        return Reference(self.place(name, writing=False))

    def space(self, name: str) -> str:
        """Return the namespace of the blocks of a session: that of its owner."""
        owner, slash, _ = name.rpartition("/")
        return owner if slash else LOCAL

    def sessions(self, owner: str | None = None) -> list[SessionInfo]:
        """Return all sessions, or those of one owner; the last used first."""
        self.check()
        found = []
        for name in self._names(owner):
            with suppress(FileNotFoundError):  # another program removed it
                found.append(self._info(name))
        return sorted(found, key=lambda info: (-info.used, info.name))

    def info(self, name: str) -> SessionInfo:
        """Return the facts about one session."""
        self._existing(name)
        return self._info(name)

    def remove(self, name: str) -> None:
        """Remove a session, even one that cannot be read, and its blocks, except those that other sessions have. Raises
        SessionBusy if a program has it open for writing, and SessionUnwritable."""
        files, keys = self._existing(name), set[str]()
        if files.in_use():
            raise SessionBusy(f"The session '{name}' is in use by another program; end that program first.")
        try:
            with suppress(SessionError):
                keys = keys_of(Reference(files).about)
            try:
                files.remove_all()
            finally:
                if gone := not files.generations():
                    self.release(name, keys)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and gone:
                raise SessionUnwritable(
                    f"The session '{name}' is removed, but its folder '{files.path}' stays: it contains other files."
                ) from error
            raise SessionUnwritable(f"The session '{name}' cannot be removed: {reason_of(error)}.") from error

    def evict(self) -> int:
        """Remove blocks over the quota, sessions and blocks over the age, and what killed programs left behind; return
        the number of removed sessions."""
        self.check()
        gone = 0
        for name in [*self._names()] if self.age is not None else ():
            with suppress(OSError, SessionError):  # if one cannot be removed, continue with the others
                if time.time() - self.files(name).used() > (self.age or 0):
                    self.remove(name)
                    gone += 1
        self.blocks.evict(self.age)
        with suppress(OSError):
            self.records.evict(self.age)
        with suppress(OSError):
            remove_abandoned(self.folder)
            left = self.blocks.names(unused_s=ABANDONED_S)
            self._remove_unnamed([name for name in left if belongs_to_sessions(name.key)])
        return gone

    def remove_unused(self) -> None:
        """Remove the blocks that no session has, and the records of answers. Raises OSError."""
        self.records.clear()
        self._remove_unnamed(self.blocks.names())

    def release(self, name: str, keys: set[str]) -> None:
        """Remove blocks that the session ``name`` does not have any more, except those of its owner's other sessions,
        and what was stored of the text after them."""
        try:
            self._remove_unnamed([BlockName(self.space(name), key) for key in keys], but=name)
        except OSError as error:  # what other sessions have is unknown
            log.warning("Blocks that '%s' does not have any more are not removed: %s.", name, reason_of(error))

    def _remove_unnamed(self, blocks: Sequence[BlockName], but: str = "") -> None:
        """Remove those of ``blocks`` that no session of their owner names, except ``but``, and what was stored of the
        text after them. Raises OSError."""
        for space in {name.space for name in blocks}:
            names = [*self._names(None if space == LOCAL else space)]
            names = [name for name in names if self.space(name) == space and name != but]
            known = b"".join(newest(self.files(name))[1] for name in names)
            for key in [name.key for name in blocks if name.space == space and name.key.encode() not in known]:
                for one in (key, *(key_after(key, what) for what in (TAIL, MESSAGE, STATE))):
                    self.blocks.remove(BlockName(space, one))

    def set_aside(self, name: str) -> str:
        """Rename a session that cannot be read, so that a new one can use its name; return the new name."""
        files, (owner, slash, word) = self._existing(name), name.rpartition("/")
        for number in itertools.count(1):
            other = f"{owner}{slash}{word[:80]}.damaged-{number}"
            if not self.files(other).exists():
                try:
                    files.rename(self.files(other))
                except OSError as error:
                    raise unwritable(files.path, error) from error
                return other
        raise AssertionError

    def _existing(self, name: str) -> SessionFiles:
        files = self.files(name)
        self.check()
        if not files.exists():
            raise SessionError(f"There is no session '{name}' in '{self.folder}'; 'kvkeep cache' lists the sessions.")
        return files

    def _names(self, owner: str | None = None) -> Iterator[str]:
        """Yield the name of each session, or of one owner's."""
        patterns = [f"*{SUFFIX}", f"*/*{SUFFIX}"] if owner is None else [f"{owner}/*{SUFFIX}"]
        for path in itertools.chain(*map(self._sessions.glob, patterns)):
            name = path.relative_to(self._sessions).as_posix().removesuffix(SUFFIX)
            if _NAME.fullmatch(name) and is_folder(path.parent) and is_folder(path):
                yield name

    def _info(self, name: str) -> SessionInfo:
        """Return the facts about a session. Raises OSError if it is missing."""
        files = self.files(name)
        common: dict[str, Any] = {"name": name, "path": str(files.path), "used": files.used(), "in_use": files.in_use()}
        try:
            reference = Reference(files)
            about = checked(reference.about)
            sizes = [self.blocks.size(BlockName(self.space(name), key)) for key in (*about["blocks"], about["state"])]
            return SessionInfo(
                **common,
                bytes=sum(sizes),
                created=about["created"],
                saves=reference.saves,
                tokens=about["past"]["rows"] * about["past"]["length"],
                missing=sizes.count(0),
                model=_model_of(about),
                method=about["method"],
                budget=about["budget"],
            )
        except SessionError as error:
            problem, other = (str(error) if files.generations() else UNSAVED), isinstance(error, SessionVersion)
        return SessionInfo(**common, bytes=0, problem=problem, other_version=other)


def _model_of(about: dict[str, Any]) -> str:
    name = about["notes"].get("model")
    return name if isinstance(name, str) and name and name.isprintable() else str(about["family"])


def keys_of(about: dict[str, Any] | None) -> set[str]:
    """Return the keys of the blocks that a reference names; none if it is not as kvkeep writes it."""
    with suppress(LookupError, TypeError):
        return {*map(str, (about or {})["blocks"]), str((about or {})["state"])}
    return set()


def place_of(name: str, folder: str | None = None) -> tuple[Store, str]:
    """Return the store of a session, which need not exist, and its name there. folder: of the store; None: the user's,
    or that of the session itself, if it is named by the path of its folder: one that is absolute, begins with a dot or
    a tilde, or ends with ".session"."""
    is_path = name.startswith((".", "~")) or name.endswith(SUFFIX) or Path(name).is_absolute()
    if folder is None and is_path:
        return Store(Path(name).expanduser(), quota=None), ONLY
    return user_store(folder), name
