"""A store in a bucket (S3), so that servers on machines that share no folder continue each other's sessions.

The bucket has the blocks and the references of sessions, under the names of their files. A reference is created on the
condition that its number is free. A local folder has copies of blocks, for which quota and age hold; a block that it
lacks is fetched. How long the bucket keeps what it has is a rule of its own (lifecycle).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
from torch import Tensor

from kvkeep.blocks.folder import BlockFolder, BlockName, encode, parse
from kvkeep.blocks.references import SessionFiles
from kvkeep.blocks.store import MARKER, SUFFIX, VERSION, Store
from kvkeep.errors import BlockDamaged, BlockMissing, SessionBusy, SessionUnwritable, StoreError, UsageError
from kvkeep.memory.places import MEMORY, Place

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITS = {"connect_timeout": 2, "read_timeout": 20, "retries": {"max_attempts": 0}}
"""Seconds that a request to S3 waits; s3fs repeats it after a lost connection."""
PAUSE_S = 60.0
"""Seconds for which blocks are neither fetched nor copied after an error of the bucket."""
_GENERATION = re.compile(r"([1-9][0-9]{0,9})\.json")


class BucketError(OSError, SessionUnwritable):
    """The bucket cannot be used."""


class Bucket:
    """The objects below ``root``, by their paths. All methods raise BucketError.

    files: the file system of fsspec.
    """

    def __init__(self, files: Any, root: str) -> None:
        self.files, self.root = files, PurePosixPath(root)

    def read(self, path: PurePosixPath) -> bytes:
        """Return the content of an object. Raises FileNotFoundError."""
        with _reported():
            return bytes(self.files.cat_file(str(path)))

    def write(self, path: PurePosixPath, data: bytes, mode: str = "overwrite") -> None:
        """Create or replace an object."""
        with _reported():
            if "s3" not in self.files.protocol:  # there a folder needs no creation, and would be taken for a bucket
                self.files.makedirs(str(path.parent), exist_ok=True)
            self.files.pipe_file(str(path), data, mode=mode)

    def create(self, path: PurePosixPath, data: bytes) -> None:
        """Create an object. Raises FileExistsError if it exists with other content."""
        try:
            self.write(path, data, "create")
        except FileExistsError:
            if self.read(path) != data:  # a request that is repeated after a lost answer finds its own object
                raise

    def remove(self, path: PurePosixPath) -> None:
        """Remove an object, if it exists."""
        with _reported(), suppress(FileNotFoundError):
            self.files.rm_file(str(path))

    def list(self, path: PurePosixPath) -> list[PurePosixPath]:
        """Return the paths of all objects below ``path``."""
        with _reported(), suppress(FileNotFoundError):
            return [PurePosixPath(one) for one in self.files.find(str(path))]
        return []

    def size(self, path: PurePosixPath) -> int:
        """Return the bytes of an object; 0 if there is none."""
        with _reported(), suppress(FileNotFoundError):
            return int(self.files.size(str(path)))
        return 0

    def modified(self, path: PurePosixPath) -> float:
        """Return the time of the last change, in seconds since 1970."""
        with _reported():
            return float(self.files.modified(str(path)).timestamp())


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:  # of many kinds: no network, no credentials
        raise BucketError(f"The bucket cannot be used: {str(error).rstrip('.')}") from error


class BucketSession(SessionFiles):
    """The files of one session as objects. There are no locks: of two programs that save the same number, one fails."""

    def __init__(self, path: PurePosixPath, bucket: Bucket) -> None:
        super().__init__(path)  # type: ignore[arg-type] # of which messages have the text
        self.at, self.bucket = path, bucket

    @property
    def name(self) -> str:
        """The session's name in its files."""
        return "/".join(self.at.parts[-2:])

    def exists(self) -> bool:
        """Return whether there are objects."""
        return bool(self.bucket.list(self.at))

    def generations(self) -> list[int]:
        """Return the numbers of all generations in order."""
        found = (_GENERATION.fullmatch(path.name) for path in self.bucket.list(self.at))
        return sorted(int(one[1]) for one in found if one is not None)

    def read(self, number: int) -> bytes:
        """Return the content of a generation."""
        return self.bucket.read(self._file(number))

    def write(self, number: int, data: bytes) -> None:
        """Create a generation. Raises SessionBusy if another program has created it or a later one."""
        try:
            self.bucket.create(self._file(number), data)
        except FileExistsError as error:
            raise self._followed() from error
        if max(self.generations(), default=number) > number:  # the number had been used, and was removed
            self.remove(number)
            raise self._followed()

    def _followed(self) -> SessionBusy:
        return SessionBusy(
            f"The session '{self.path}' was continued by another program, so this turn is not saved; open it again to "
            "continue from what that program saved."
        )

    def remove(self, number: int) -> None:
        """Remove a generation, if it exists."""
        self.bucket.remove(self._file(number))

    def hold(self) -> None:
        """Raise OSError if the bucket cannot be used."""
        self.exists()

    def has_lock(self) -> bool:
        """Return True: there is no folder that could be removed or replaced."""
        return True

    def in_use(self) -> bool:
        """Return False: a bucket has no locks."""
        return False

    def used(self) -> float:
        """Return the time of the last save. Raises FileNotFoundError if there is none."""
        if not (found := self.bucket.list(self.at)):
            raise FileNotFoundError(str(self.at))
        return max(map(self.bucket.modified, found))

    def rename(self, target: SessionFiles) -> None:
        """Give the session another name."""
        for number in self.generations():
            target.write(number, self.read(number))
        self.remove_all()

    def remove_all(self) -> None:
        """Remove all objects: the highest generation first, so that no earlier one comes back."""
        for number in reversed(self.generations()):
            self.remove(number)
        for path in self.bucket.list(self.at):
            self.bucket.remove(path)

    def _file(self, number: int) -> Any:
        return self.at / f"{number}.json"


class BucketFolder(BlockFolder):
    """Blocks in the bucket below ``root``, and copies of the last used ones in a local folder, within ``quota``."""

    def __init__(self, folder: Path, quota: int | None, bucket: Bucket) -> None:
        super().__init__(folder, quota)
        self.bucket = bucket
        self._paused = 0.0  # until then

    def use(self, names: Sequence[BlockName], when: int | None = None) -> int:
        """As :meth:`BlockFolder.use`; blocks are fetched, up to the first that does not exist."""
        for name in names:
            if not self.has(name) and not self._fetch(name):
                break
        return super().use(names, when)

    def read(self, name: BlockName, home: Place = MEMORY) -> dict[str, Tensor]:
        """As :meth:`BlockFolder.read`; a block that is missing or damaged is fetched."""
        try:
            return super().read(name, home)
        except (BlockMissing, BlockDamaged):
            if not self._fetch(name):
                raise
        return super().read(name, home)

    def write(self, name: BlockName, tensors: Mapping[str, Tensor], replace: bool = False) -> int:
        """As :meth:`BlockFolder.write`, to the bucket first."""
        if replace or not self.has(name):
            data = b"".join(encode(name.key, tensors))
            self._ask(lambda: self.bucket.write(self.object(name), data))
        return super().write(name, tensors, replace)

    def size(self, name: BlockName) -> int:
        """Return the bytes of a block in the bucket; 0 if there is none. Raises BucketError."""
        return self.bucket.size(self.object(name))

    def fitting(self, count: int, size: int, others: int = 0) -> int:
        """All blocks fit into the bucket."""
        return count

    def remove(self, name: BlockName) -> None:
        """Remove a block, here and in the bucket."""
        super().remove(name)
        with suppress(StoreError):
            self._ask(lambda: self.bucket.remove(self.object(name)))

    def object(self, name: BlockName) -> PurePosixPath:
        """Return the path of a block's object."""
        return self.bucket.root / "blocks" / self.path(name).relative_to(self.folder).as_posix()

    def _fetch(self, name: BlockName) -> bool:
        """Copy a block from the bucket to the folder; return whether there is one."""
        with suppress(StoreError):
            if (data := self._ask(lambda: self.bucket.read(self.object(name)))) is None:
                return False
            try:
                super().write(name, parse(bytearray(data), name.key))
                return True
            except BlockDamaged:
                log.warning("A damaged block is removed from the bucket; its text is read again.")
                self.remove(name)
        return False

    def _ask(self, request: Callable[[], T]) -> T | None:
        """Return the answer; None if there is no such object. Raises StoreError if the bucket cannot be used, or could
        not lately."""
        if time.monotonic() < self._paused:
            raise StoreError("The bucket could not be used a moment ago.")
        try:
            return request()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._paused = time.monotonic() + PAUSE_S
            log.warning("Blocks of the bucket are not used for %g s: %s", PAUSE_S, error)
            raise StoreError(f"{error}.") from error


class BucketStore(Store):
    """A store in the bucket ``url`` (``s3://BUCKET/PREFIX``; ``file://FOLDER`` in tests), with copies of blocks in
    ``folder``.

    Raises UsageError for another url, and if the bucket cannot be used.
    """

    def __init__(self, folder: Path | str, url: str, *, quota: int | None = None, age: float | None = None) -> None:
        super().__init__(folder, quota=quota, age=age)
        if not re.fullmatch(r"(s3://|file:///)[^/].*", url):
            raise UsageError(f"'{url}' is not a bucket; give s3://BUCKET/PREFIX.")
        options = {"config_kwargs": WAITS} if url.startswith("s3:") else {}
        self.bucket = Bucket(*fsspec.core.url_to_fs(url, use_listings_cache=False, **options))
        self.blocks = BucketFolder(self.folder / "blocks", quota, self.bucket)
        self._sessions = self.bucket.root / "sessions"
        try:
            self.bucket.create(self.bucket.root / MARKER, f"{VERSION}\n".encode())
        except FileExistsError as error:
            raise UsageError(f"'{url}' is of another version of kvkeep; name another prefix.") from error
        except OSError as error:
            raise UsageError(
                f"Nothing can be stored in '{url}': {str(error.__cause__ or error).rstrip('.')}."
            ) from error

    def files(self, name: str) -> SessionFiles:
        """Return the objects of the session of this name."""
        return BucketSession(PurePosixPath(self.path(name)), self.bucket)

    def evict(self) -> int:
        """Remove blocks and records over quota or age from the folder."""
        self.blocks.evict(self.age)
        with suppress(OSError):
            self.records.evict(self.age)
        return 0

    def _names(self, owner: str | None = None) -> Iterator[str]:
        """Yield the name of each session, or of one owner's."""
        root = self._sessions if owner is None else self._sessions / owner
        for path in sorted({path.parent for path in self.bucket.list(root)}):
            name = path.relative_to(self._sessions).as_posix().removesuffix(SUFFIX)
            with suppress(UsageError):  # it is none of kvkeep's
                self.path(name)
                yield name
