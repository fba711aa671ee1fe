"""A journal in a folder that several machines share. Each machine may lose its lock while it pauses.

A lock keeps writers apart, as on one machine. Over a network a lock can be lost: a server releases the lock of a
machine that does not respond. That machine may resume later, after a pause of any length, at any point of its program.
It is stopped because a name can be renamed only once. A writer *takes* the file in these steps: it moves the file to
``.taken/`` beside it, under a unique name; it reads the committed turns; it appends its lease; and it links the file to
its place, which fails if a file is there. If the previous writer has not recorded its end, it may still write to its
open file. Then a copy of the committed turns gets the name instead. After every turn, a writer checks that its file is
still at its place. The file is taken before it is read, so there are two cases: the reader saw the turn, or the turn's
writer finds its file gone and is refused. The protocol uses no clock.

A writer that ends between taking and linking leaves a file in ``.taken/``, which the next writer takes. Writers that
take a session at the same moment need the lock, so a folder without locks is refused.
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
"""The folder of taken files, beside the sessions. It is empty except for moments, so listing it is cheap."""
_SCANS = 2
"""The number of listings: a listing may miss a name that changes during it."""
_COPY_BYTES = 1 << 20


class SharedWriter(Writer):
    """The writer of a journal in a shared folder. before: the previous writer's mark. Raises SessionError as
    :class:`~kvkeep.decode.journal.Writer` does, and SessionBusy for a turn if another writer has followed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._named, self.before = Path(os.path.realpath(path)), False, b""
        try:
            for _ in range(_TRIES):
                with suppress(FileNotFoundError, FileExistsError, BlockingIOError):  # another writer was first
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
        """Raise UsageError for a folder where files cannot be locked, or linked from one folder to another."""
        name = folder / TAKEN / f".links-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            name.parent.mkdir(exist_ok=True, mode=0o700)  # never removed: other programs may be checking, too
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
        """Take the file, or create it. Raises OSError if another writer is taking it."""
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
        """Return a unique name for a file that will be linked to its place."""
        name = temporary_name(self.path)
        name.unlink(missing_ok=True)
        return name

    def _taken(self, place: Path) -> Path:
        """Move the file at ``place`` to a unique name in ``.taken/``; return that name. Raises FileNotFoundError if it
        is not the open file."""
        taken = self.path.parent / TAKEN / f"{self.path.name}.{secrets.token_hex(8)}"
        try:
            os.rename(place, taken)
        except FileNotFoundError:  # the file or the folder
            taken.parent.mkdir(exist_ok=True, mode=0o700)
            os.rename(place, taken)
        if not is_at(self._file, taken):
            self._put(taken, taken)
            raise FileNotFoundError(2, "No such file or directory", str(place))
        return taken

    def _put(self, file: Path, taken: Path) -> None:
        """Link ``file`` to its place, and remove the name ``taken``. Raises FileExistsError if a file is at the place;
        then ``taken`` remains if its lease is later."""
        try:
            os.link(file, self.path)
        except FileExistsError:
            if _lease_of(self.path) >= _lease_of(taken):
                taken.unlink(missing_ok=True)
            raise
        taken.unlink(missing_ok=True)

    def _placed(self) -> None:
        """Check that no other taken file has this lease or a later one, after this file was put in its place. Raises
        FileExistsError."""
        self._named = True
        for name in left_of(self.path):
            if _lease_of(name) >= self.lease:
                self._taken(self.path).unlink()
                raise FileExistsError
            name.unlink(missing_ok=True)  # left by a writer that ended between link and removal
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
                self._start()  # the turns committed before the file was taken
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
        """Switch to a copy of the committed turns; return its name."""
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
        """Append a turn. Raises SessionBusy if another writer has followed, even after a long pause of this one."""
        super().commit(payload)
        self._check_lease()

    def rewrite(self, fill: Callable[[Self], None]) -> None:
        """Replace the file, as one transaction, by one that ``fill`` writes and commits."""
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
        """Release the session: record that this writer has ended, or remove a file without any turn."""
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
        """Remove the file, and release it. Raises OSError if another writer has taken it."""
        self._unlink()
        self._file.close()

    def _unlink(self) -> None:
        """Remove the file. Raises FileNotFoundError if another writer has taken it."""
        self._taken(self.path).unlink()
        for name in left_of(self.path):  # left by writers that ended early: it would reappear
            name.unlink(missing_ok=True)


def left_of(path: Path) -> list[Path]:
    """Return the taken files of a session that are not in their place, now or ever; the one with the last lease
    first."""
    found = {name for _ in range(_SCANS) for place, name in left_in(path.parent) if place == path}
    return sorted(found, key=_lease_of, reverse=True)


def left_in(folder: Path) -> list[tuple[Path, Path]]:
    """Return place and current path of each taken file of ``folder``."""
    try:
        names = os.listdir(folder / TAKEN)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(folder / name.rpartition(".")[0], folder / TAKEN / name) for name in names]


def forget_taken(folder: Path) -> None:
    """Remove the folder of taken files if it is empty. A writer that takes a file creates it again."""
    with suppress(OSError):
        (folder / TAKEN).rmdir()


def _lease_of(path: Path) -> int:
    """Return the number of a file's last lease; 0 if the file is missing or damaged."""
    try:
        with Journal(path) as file:
            return file.lease
    except SessionError:
        return 0
