"""A journal in a folder that several machines share, each of which may lose its lock while it pauses.

A lock keeps writers apart, as it does on one machine. Over a network it can be lost: a server gives up the lock of a
machine that it has not heard of, which goes on later, after a pause of any length, wherever it was. What stops that one
is that a name can be renamed once. A writer *takes* the file by moving it to ``.taken/``, beside, under a name of its
own, reads what was committed, appends its lease, and links the file to its place, which fails where there is one.
Unless the writer before it has said that it ended, that one may still write to the file that it has open; then a copy
of what was committed gets the name. A writer looks after every turn whether its file is still at its place. As a file
is taken before it is read, either the turn is in what was read, or its writer finds the file gone, and is refused.
Nothing depends on a clock.

A writer that ends between the two leaves a file in ``.taken/``, which the next one takes in its turn. Several
that take a session in the same moment need the lock; a folder without locks is refused.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self

from kvkeep.decode.journal import LEASE, NUMBER, Journal, Writer, is_at, lock, sync_name, unwritable
from kvkeep.errors import SessionBusy, SessionError, UsageError
from kvkeep.files import temporary_name

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TRIES, _EACH_S = 20, 0.005
TAKEN = ".taken"
"""The folder of files that were taken, beside the sessions; empty but for moments, so that looking into it is cheap."""
_SCANS = 2
"""A name that is changed while a folder is listed may be missing in the list."""
_COPY_BYTES = 1 << 20


class SharedWriter(Writer):
    """The writer of a journal in a shared folder. before: the mark of the writer before it. Raises SessionError as
    :class:`~kvkeep.decode.journal.Writer` does, and SessionBusy for a turn if another writer has followed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._named, self.before = Path(os.path.realpath(path)), False, b""
        try:
            for _ in range(_TRIES):
                with suppress(FileNotFoundError, FileExistsError, BlockingIOError):  # another one was first
                    self._open()
                    return
                time.sleep(_EACH_S)
        except OSError as error:
            raise unwritable(self.path, error) from error
        raise SessionBusy(
            f"The session '{self.path}' is in use by another program; end that program, or name another session."
        )

    @staticmethod
    def check_folder(folder: Path) -> None:
        """Raise UsageError for a folder in which no file can be locked, or linked from one folder to another."""
        name = folder / TAKEN / f".links-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            name.parent.mkdir(exist_ok=True, mode=0o700)  # it stays: others may be checking, too
            name.touch()
            try:
                if fcntl is not None:
                    with FileIO(str(name), "r+") as file:
                        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.link(name, folder / name.name)
                (folder / name.name).unlink()
            finally:
                name.unlink()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(
                f"Sessions cannot be shared in '{folder}', where files have to be made, locked and linked: {reason}."
            ) from error

    def _open(self) -> None:
        """Take the file, or make it. Raises OSError where another one is at it."""
        left = [self.path] if self.path.exists() else left_of(self.path)
        place = left[0] if left else self._name()
        self._file = FileIO(str(place), "r+" if left else "x+")
        try:
            lock(self._file)
            if left:
                self._take(place)
            else:
                self._make(place)
        except BaseException:
            self._file.close()
            raise

    def _name(self) -> Path:
        """Return a name for a file that is to be linked to its place; nobody else has it."""
        name = temporary_name(self.path)
        name.unlink(missing_ok=True)
        return name

    def _taken(self, place: Path) -> Path:
        """Move the file at ``place`` to a name of one's own, and return that. Raises FileNotFoundError if it is not the
        one that is open."""
        taken = self.path.parent / TAKEN / f"{self.path.name}.{secrets.token_hex(8)}"
        try:
            os.rename(place, taken)
        except FileNotFoundError:  # the one, or the folder
            taken.parent.mkdir(exist_ok=True, mode=0o700)
            os.rename(place, taken)
        if not is_at(self._file, taken):
            self._put(taken, taken)
            raise FileNotFoundError(2, "No such file or directory", str(place))
        return taken

    def _put(self, file: Path, taken: Path) -> None:
        """Link ``file`` to its place, and forget the name ``own``. Raises FileExistsError where there is one; the name
        then stays where that one is not of a later lease."""
        try:
            os.link(file, self.path)
        except FileExistsError:
            if _lease_of(self.path) >= _lease_of(taken):
                taken.unlink(missing_ok=True)
            raise
        taken.unlink(missing_ok=True)

    def _placed(self) -> None:
        """Check that no other file is of a later lease, now that this one is in its place: one that was on its way.
        Raises FileExistsError."""
        self._named = True
        for name in left_of(self.path):
            if _lease_of(name) >= self.lease:
                self._taken(self.path).unlink()
                raise FileExistsError
            name.unlink(missing_ok=True)  # of a writer that ended between its link and this
        sync_name(self.path)

    def _make(self, name: Path) -> None:
        try:
            self._start()
            self._begin()
            os.link(name, self.path)
        finally:
            name.unlink(missing_ok=True)
        self._placed()

    def _take(self, place: Path) -> None:
        taken = file = self._taken(place)
        try:
            try:
                self._start()  # what was committed before it was taken
                self.before = self.mark
                if not self.released:
                    file = self._copy()
                self._begin()
            except BaseException:
                self._put(taken, taken)
                raise
            self._put(file, taken)
        finally:
            if file != taken:
                file.unlink(missing_ok=True)
        self._placed()

    def _copy(self) -> Path:
        """Go on with a copy of what was committed, and return its name."""
        name = self._name()
        copy = FileIO(str(name), "x+")
        try:
            lock(copy)
            for start in range(0, self.end, _COPY_BYTES):
                data = memoryview(self._read(start, min(_COPY_BYTES, self.end - start)))
                while data:
                    data = data[copy.write(data) :]
        except BaseException:
            copy.close()
            name.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = copy
        return name

    def commit(self, payload: bytes) -> None:
        """Append a turn. Raises SessionBusy if another writer has followed, however long this one has paused."""
        super().commit(payload)
        self._check_lease()

    def rewrite(self, fill: Callable[[Self], None]) -> None:
        """Replace the file by one that ``fill`` writes and commits to, as a whole or not at all."""
        self._check_lease()
        name = self._name()
        fresh = FileIO(str(name), "x+")
        try:
            lock(fresh)
            made: Any = self._on(self.path, fresh, self.lease)
            fill(made)
            self._put(name, self._taken(self.path))
        except (FileNotFoundError, FileExistsError) as error:
            fresh.close()
            raise self._followed() from error
        except BaseException:
            fresh.close()
            raise
        finally:
            name.unlink(missing_ok=True)
        self._file.close()
        self.__dict__ |= made.__dict__
        self._named = True
        sync_name(self.path)

    def close(self) -> None:
        """Release the session: say that this writer has ended, or remove what was never given a turn."""
        if self._file.closed:
            return
        with suppress(OSError, SessionError):
            if self.turns:
                self.undo()
                self._check_lease()
                self._record(LEASE, [NUMBER.pack(self.lease), self.mark, b"\1"])
            elif self._named:
                self._unlink()
        self._file.close()

    def remove(self) -> None:
        """Remove the file, and release it. Raises OSError if it is another writer's."""
        self._unlink()
        self._file.close()

    def _unlink(self) -> None:
        """Remove the file. Raises FileNotFoundError if it is another writer's."""
        self._taken(self.path).unlink()
        for name in left_of(self.path):  # of those that ended in the middle: it would come back
            name.unlink(missing_ok=True)


def left_of(path: Path) -> list[Path]:
    """Return files of a session that were taken, and not put in their place yet, or never; that with the last lease
    first."""
    found = {name for _ in range(_SCANS) for place, name in left_in(path.parent) if place == path}
    return sorted(found, key=_lease_of, reverse=True)


def left_in(folder: Path) -> list[tuple[Path, Path]]:
    """Return the place of each file of ``folder`` that was taken, and where it is."""
    try:
        names = os.listdir(folder / TAKEN)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(folder / name.rpartition(".")[0], folder / TAKEN / name) for name in names]


def forget_taken(folder: Path) -> None:
    """Remove the folder of files that were taken, if it is empty; whoever takes one makes it."""
    with suppress(OSError):
        (folder / TAKEN).rmdir()


def _lease_of(path: Path) -> int:
    """Return the number of a file's last lease; 0 for one that is gone or damaged."""
    try:
        with Journal(path) as file:
            return file.lease
    except SessionError:
        return 0
