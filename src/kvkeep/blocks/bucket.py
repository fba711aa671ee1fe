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
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar

from torch import Tensor

from kvkeep.blocks.block_file import encode, parse
from kvkeep.blocks.folder import SUFFIX, BlockFolder, BlockName
from kvkeep.blocks.store import MARKER, VERSION, Store
from kvkeep.errors import BlockDamaged, BlockMissing, SessionUnwritable, StoreError, UsageError
from kvkeep.extras import optional
from kvkeep.memory.places import MEMORY, Place

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITS = {"connect_timeout": 2, "read_timeout": 20, "retries": {"max_attempts": 0}}
"""Seconds that a request to S3 waits; s3fs repeats it after a lost connection."""
PAUSE_S = 60.0
"""Seconds for which blocks are neither fetched nor copied after an error of the bucket."""


class BucketPath(PurePosixPath):
    """The key of an object, with the methods of a Path that a store needs. A folder exists while it has objects."""

    files: Any
    """The file system of fsspec."""

    def read_bytes(self) -> bytes:
        """Return the content. Raises OSError, as all methods do."""
        with _reported():
            return bytes(self.files.cat_file(str(self)))

    def write_bytes(self, data: bytes, mode: str = "overwrite") -> None:
        """Create or replace the object."""
        with _reported():
            if "s3" not in self.files.protocol:  # there a folder needs no creation, and would be taken for a bucket
                self.files.makedirs(str(self.parent), exist_ok=True)
            self.files.pipe_file(str(self), data, mode=mode)

    def create(self, data: bytes) -> None:
        """Create the object. Raises FileExistsError if it exists with other content."""
        try:
            self.write_bytes(data, "create")
        except FileExistsError:
            if self.read_bytes() != data:  # a request that is repeated after a lost answer finds its own object
                raise

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object, if it exists."""
        with _reported(), suppress(FileNotFoundError):
            self.files.rm_file(str(self))

    def iterdir(self) -> Iterator[BucketPath]:
        """Yield all objects below."""
        with _reported(), suppress(FileNotFoundError):
            yield from [type(self)(path) for path in self.files.find(str(self))]

    def sizes(self) -> dict[BucketPath, int]:
        """Return the bytes of all objects below."""
        with _reported(), suppress(FileNotFoundError):
            found = self.files.find(str(self), detail=True)
            return {type(self)(path): facts["size"] for path, facts in found.items()}
        return {}

    def size(self) -> int:
        """Return the bytes of the object; 0 if there is none."""
        with _reported(), suppress(FileNotFoundError):
            return int(self.files.size(str(self)))
        return 0

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Yield the folders that match."""
        folders, depth = {path.parent for path in self.iterdir()}, len((self / pattern).parts)
        yield from (folder for folder in folders if len(folder.parts) == depth and folder.match(pattern))

    def is_dir(self) -> bool:
        """Return whether there are objects below."""
        return any(self.iterdir())

    def mkdir(self, **_: Any) -> None:
        """Raise OSError if the bucket cannot be used."""
        self.is_dir()

    def open(self, *_: Any) -> Any:
        """Raise FileNotFoundError: there are no locks to open."""
        raise FileNotFoundError

    exists, rmdir, absolute = is_dir, lambda self: None, lambda self: self

    def stat(self) -> Any:
        """Return the time of the last change."""
        with _reported():
            return SimpleNamespace(st_mtime=self.files.modified(str(self)).timestamp())

    def rename(self, target: BucketPath) -> None:
        """Give a folder another name."""
        for path in self.iterdir():
            (target / path.name).write_bytes(path.read_bytes())
            path.unlink()


class BucketError(OSError, SessionUnwritable):
    """The bucket cannot be used."""


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except Exception as error:  # of many kinds: no network, no credentials
        raise BucketError(f"The bucket cannot be used: {str(error).rstrip('.')}") from error


class BucketFolder(BlockFolder):
    """Blocks in the bucket below ``root``, and copies of the last used ones in a local folder, within ``quota``."""

    def __init__(self, folder: Path, quota: int | None, root: BucketPath) -> None:
        super().__init__(folder, quota)
        self.root = root
        self._paused = 0.0  # until then

    def use(self, names: Sequence[BlockName], when: int | None = None) -> int:
        """As :meth:`BlockFolder.use`; blocks are fetched, up to the first that does not exist."""
        for name in names:
            if not super().use([name], when) and not self._fetch(name):
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
            data = b"".join(encode(name.key, tensors)[1])
            self._ask(lambda: self._key(name).write_bytes(data))
        return super().write(name, tensors, replace)

    def size(self, name: BlockName) -> int:
        """Return the bytes of a block in the bucket; 0 if there is none. Raises BucketError."""
        return self._key(name).size()

    def content(self, name: BlockName) -> bytearray:
        """Return the bytes of a block in the bucket. Raises OSError."""
        return bytearray(self._key(name).read_bytes())

    def check(self, name: BlockName) -> int:
        """Read a block of the bucket and return its bytes. Raises BlockMissing, BlockDamaged after removing it, and
        BucketError."""
        try:
            parse(data := self.content(name), name.key)
            return len(data)
        except FileNotFoundError as error:
            raise BlockMissing(f"The block '{self._key(name)}' is missing.") from error
        except BlockDamaged as error:
            self.remove(name)
            raise BlockDamaged(f"The block '{self._key(name)}' is removed: its object {error}.") from error

    def names(self, unused_s: float | None = None) -> list[BlockName]:
        """Return the names of all blocks in the bucket; with ``unused_s``, none, because a bucket notes no use."""
        return [*self._sizes()] if unused_s is None else []

    def count(self) -> tuple[int, int]:
        """Return the number of blocks in the bucket and their bytes."""
        sizes = self._sizes()
        return len(sizes), sum(sizes.values())

    def _sizes(self) -> dict[BlockName, int]:
        return {
            BlockName(path.parents[1].relative_to(self.root).as_posix(), path.stem): size
            for path, size in self.root.sizes().items()
            if path.suffix == SUFFIX
        }

    def fitting(self, count: int, size: int, others: int = 0) -> int:
        """All blocks fit into the bucket."""
        return count

    def remove(self, name: BlockName) -> None:
        """Remove a block, here and in the bucket."""
        super().remove(name)
        with suppress(StoreError):
            self._ask(self._key(name).unlink)

    def _key(self, name: BlockName) -> BucketPath:
        return self.root / self.path(name).relative_to(self.folder).as_posix()

    def _fetch(self, name: BlockName) -> bool:
        """Copy a block from the bucket to the folder; return whether there is one."""
        with suppress(StoreError):
            if (data := self._ask(self._key(name).read_bytes)) is None:
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
    """A store in the bucket ``url`` (``s3://BUCKET/PREFIX``; ``file://FOLDER`` in tests), with blocks in ``folder``.

    Raises UsageError for another url, without the package for it, and if the bucket cannot be used.
    """

    def __init__(self, folder: Path | str, url: str, *, quota: int | None = None, age: float | None = None) -> None:
        super().__init__(folder, quota=quota, age=age, shared=True)
        if not re.fullmatch(r"(s3://|file:///)[^/].*", url):
            raise UsageError(f"'{url}' is not a bucket; give s3://BUCKET/PREFIX.")
        options = {}
        if url.startswith("s3:"):
            optional("s3fs", "s3")
            options = {"config_kwargs": WAITS}
        files, root = optional("fsspec", "s3").core.url_to_fs(url, use_listings_cache=False, **options)
        self.root = type("BucketPath", (BucketPath,), {"files": files})(root)
        local = self.folder / "buckets" / blake2b(url.encode(), digest_size=8).hexdigest()
        self.blocks = BucketFolder(local, quota, self.root / "blocks")
        self._sessions: Any = self.root / "sessions"
        self._create_file = lambda path, data, locked: path.create(data)
        try:
            (self.root / MARKER).create(f"{VERSION}\n".encode())
        except FileExistsError as error:
            raise UsageError(f"'{url}' is of another version of kvkeep; name another prefix.") from error
        except OSError as error:
            raise UsageError(
                f"Nothing can be stored in '{url}': {str(error.__cause__ or error).rstrip('.')}."
            ) from error

    def evict(self) -> int:
        """Remove blocks over quota or age from the folder."""
        self.blocks.evict(self.age)
        return 0
