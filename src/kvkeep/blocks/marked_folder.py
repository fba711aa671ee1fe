"""The folder of a store, which a file with the version of its format marks.

The folder may be removed or replaced while programs use it. Before a program writes, it looks for the file with the
version. Without it, or with another one, the folder is another than before, and sessions are saved there as a whole.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvkeep.blocks.folder import LOCK
from kvkeep.blocks.references import unwritable
from kvkeep.errors import SessionUnwritable, UsageError, reason_of
from kvkeep.files.atomic import is_temporary, write_whole
from kvkeep.files.private import GONE, check_kind, close_to_others, is_file, make_folder, read_file

log = logging.getLogger(__name__)

MARKER = "kvkeep-store"
VERSION = 1
FOLDERS = ("blocks", "sessions")
"""The names of the folders in a store."""
_OF_DISKS = ("lost+found",)
"""What the root folder of a disk has."""
Marker = tuple[int, int, int]
"""Device, number and time of the file with the version, which tell a store from another one in its place."""


class MarkedFolder:
    """The folder of a store, which need not exist."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.replaced = 0
        """How often the folder was found removed or replaced."""
        self._marker: Marker | None = None  # None: this program has not used the folder yet
        self._replacing = threading.Lock()

    def check(self) -> None:
        """Raise UsageError unless the folder is a store of this version, or a new one can be created there; and
        SessionUnwritable if it was one."""
        try:
            try:
                if self._marker is None or self._marker_there() != self._marker:
                    self._check()
                for name in FOLDERS:
                    check_kind(self.folder / name, "a folder")
            except OSError as error:
                raise UsageError(f"The folder '{self.folder}' cannot be read: {reason_of(error)}.") from error
        except UsageError as error:
            if self._marker is None:
                raise
            raise SessionUnwritable(str(error)) from error

    def _check(self) -> None:
        """Raise UsageError and OSError."""
        folder = self.folder.absolute()
        if "\0" in str(folder):
            raise UsageError("A path cannot have a NUL character; name another folder.")
        try:
            found = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
            if not there.is_dir():
                raise UsageError(
                    f"Nothing can be saved in '{self.folder}': '{there}' is a file, not a folder of kvkeep; name "
                    "another."
                ) from error
            return
        if MARKER not in found:
            if not self._is_new([name for name in found if name not in _OF_DISKS and not is_temporary(name)]):
                raise UsageError(f"'{self.folder}' is not a folder of kvkeep: it holds other files; name another.")
            return
        version = read_file(folder / MARKER, 1000).decode(errors="replace").strip()
        if version != str(VERSION):
            raise UsageError(
                f"'{self.folder}' is of another version of kvkeep ({version[:20]}; this one reads {VERSION}); name "
                "another folder."
            )
        if opened := close_to_others(folder):
            log.warning("The folder '%s' %s.", self.folder, opened)
        self._note_marker()

    def _is_new(self, found: Sequence[str]) -> bool:
        """Return whether a folder without a version and with other entries ``found`` can become a store: it is empty,
        or was one. A folder of blocks with its lock was."""
        lock = self.folder / FOLDERS[0] / LOCK
        return not found or ({*found} <= {*FOLDERS} and (self._marker is not None or is_file(lock)))

    def _marker_there(self) -> Marker | None:
        """Return what tells this store from another one; None if there is none. Raises OSError."""
        try:
            facts = os.lstat(self.folder / MARKER)
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
        return facts.st_dev, facts.st_ino, facts.st_mtime_ns

    def _note_marker(self) -> None:
        """Remember the store that is there. If there was another one, say so."""
        with self._replacing:
            there = self._marker_there()
            if self._marker not in (None, there):
                self.replaced += 1
                log.warning(
                    "The store '%s' was removed or replaced while it was in use; kvkeep goes on saving to this path, "
                    "and reads text again whose blocks are gone.",
                    self.folder,
                )
            self._marker = there or self._marker

    def check_writable(self) -> None:
        """Raise UsageError if nothing can be saved in the folder."""
        self.check()
        folder = self.folder.absolute()
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not os.access(there, os.W_OK | os.X_OK):
            raise UsageError(f"Nothing can be saved in '{self.folder}': '{there}' cannot be written; name another.")

    def create(self) -> None:
        """Create the folder if it is missing, also if it was removed. Raises UsageError as :meth:`check`, and
        SessionUnwritable."""
        self.check()
        try:
            if self._marker_there() is not None:
                return
            make_folder(self.folder)
            close_to_others(self.folder)
            write_whole(self.folder / MARKER, lambda file: file.write(f"{VERSION}\n".encode()), private=True)
            self._note_marker()
        except OSError as error:
            raise unwritable(self.folder, error) from error
