"""A bucket (S3) behind the local folder of a store, so that replicas on several machines share it.

The bucket has the blocks and generations of the store, under the names of their files. Blocks are written to the local
folder first, and copied to the bucket by a thread; a block that the local folder lacks is fetched. A generation is
created in the bucket first, on the condition that its number is free, and the bucket's generations count.

The quota holds for the local folder. How long the bucket keeps blocks is a rule of the bucket's own (lifecycle).
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from kvkeep.blocks.block_file import decode
from kvkeep.blocks.folder import SUFFIX, BlockFolder, BlockName
from kvkeep.errors import BlockDamaged, BlockMissing, StoreError, UsageError
from kvkeep.extras import optional

log = logging.getLogger(__name__)

WAITS = {"connect_timeout": 2, "read_timeout": 20, "retries": {"max_attempts": 0}}
"""Seconds that a request to S3 waits; s3fs repeats it after a lost connection."""
PAUSE_S = 60.0
"""Seconds for which blocks are neither fetched nor copied after an error of the bucket."""


class Bucket:
    """The objects whose keys begin with ``url`` (``s3://BUCKET/PREFIX``). options: of its file system in fsspec.

    The operations raise OSError. Raises UsageError for an unknown kind of url.
    """

    def __init__(self, url: str, **options: Any) -> None:
        fsspec = optional("fsspec", "s3")
        if url.startswith("s3:"):
            optional("s3fs", "s3")
            options = {"config_kwargs": WAITS} | options
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except ValueError as error:
            raise UsageError(f"'{url}' is not a bucket that kvkeep knows; give s3://BUCKET/PREFIX.") from error
        self.url = url

    def get(self, key: str) -> bytes | None:
        """Return the content of an object; None if it does not exist."""
        with self._reported():
            try:
                return bytes(self._files.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""
        with self._reported():
            self._files.pipe_file(self._prepared(key), data)

    def create(self, key: str, data: bytes) -> None:
        """Create an object. Raises FileExistsError if it exists with other content."""
        with self._reported():
            try:
                self._files.pipe_file(self._prepared(key), data, mode="create")
            except FileExistsError:
                if self.get(key) != data:  # a request that is repeated after a lost answer finds its own object
                    raise

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all objects in the folder ``prefix``, relative to it."""
        with self._reported():
            folder = self._path(prefix)
            try:
                return sorted(os.path.relpath(path, folder) for path in self._files.find(folder))
            except FileNotFoundError:
                return []

    def remove(self, key: str) -> None:
        """Remove an object, if it exists."""
        with self._reported():
            try:
                self._files.rm_file(self._path(key))
            except FileNotFoundError:
                return

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _prepared(self, key: str) -> str:
        path = self._path(key)
        if "s3" not in self._files.protocol:  # there a folder needs no creation, and would be taken for a bucket
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # of many kinds: no network, no credentials
            raise OSError(f"the bucket '{self.url}' does not answer ({error})") from error


class BucketFolder(BlockFolder):
    """Blocks in a local folder within ``quota``, and in a bucket below ``prefix``."""

    def __init__(self, folder: Path, quota: int | None, bucket: Bucket, prefix: str = "blocks") -> None:
        super().__init__(folder, quota)
        self.bucket, self.prefix = bucket, prefix
        self._copies: queue.Queue[BlockName] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._known: set[str] = set()  # keys of blocks that the bucket has
        self._paused = 0.0  # until then

    def has(self, name: BlockName) -> bool:
        """Return whether the block has a file, here or in the bucket; it is fetched."""
        return super().has(name) or self._fetch(name)

    def use(self, names: Sequence[BlockName], when: int | None = None) -> int:
        """Fetch blocks up to the first that does not exist, and record their use in the local folder; return how many
        of the first ones exist."""
        for name in names:
            if not self.has(name):
                break
        return super().use(names, when)

    def read(self, name: BlockName) -> dict[str, Tensor]:
        """Return a block's tensors, as :meth:`BlockFolder.read`; a file that is missing or damaged is fetched."""
        try:
            return super().read(name)
        except (BlockMissing, BlockDamaged):
            if not self._fetch(name):
                raise
        return super().read(name)

    def write(self, name: BlockName, tensors: Mapping[str, Tensor]) -> int:
        """Write a block to the local folder, and let a thread copy it to the bucket."""
        gone = super().write(name, tensors)
        self.copy(name)
        return gone

    def remove(self, name: BlockName) -> None:
        """Remove a block, here and in the bucket."""
        super().remove(name)
        self._known.discard(self._key(name))
        try:
            self.bucket.remove(self._key(name))
        except OSError as error:
            log.warning("A block stays in the bucket: %s", error)

    def copy(self, name: BlockName) -> None:
        """Let a thread copy a block to the bucket."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvkeep-bucket", daemon=True)
            self._thread.start()
        self._copies.put(name)

    def flush(self) -> None:
        """Wait until all blocks are copied, or could not be."""
        self._copies.join()

    def _key(self, name: BlockName) -> str:
        return f"{self.prefix}/{self.path(name).relative_to(self.folder).as_posix()}"

    def _run(self) -> None:
        self._compare()
        while True:
            name = self._copies.get()
            try:
                self._copy(name)
            except OSError as error:
                log.warning("A block is not copied to the bucket: %s", error)
                self._paused = time.monotonic() + PAUSE_S
            except Exception:  # otherwise no later block would be copied
                log.exception("A block is not copied to the bucket.")
            finally:
                self._copies.task_done()

    def _compare(self) -> None:
        """List the bucket's blocks, and queue the local ones that it lacks: an earlier program was killed before it
        copied them."""
        try:
            self._known |= {f"{self.prefix}/{key}" for key in self.bucket.keys(self.prefix)}
        except OSError as error:
            log.warning("Blocks of earlier runs are not copied to the bucket: %s", error)
            return
        for name in self.names():
            self._copies.put(name)

    def _copy(self, name: BlockName) -> None:
        key = self._key(name)
        if key in self._known or time.monotonic() < self._paused:
            return
        try:
            data = self.path(name).read_bytes()
        except FileNotFoundError:  # removed meanwhile
            return
        self.bucket.put(key, data)
        self._known.add(key)

    def _fetch(self, name: BlockName) -> bool:
        """Copy a block from the bucket to the local folder; return whether there is one."""
        if time.monotonic() < self._paused:
            return False
        try:
            data = self.bucket.get(self._key(name))
            if data is None:
                return False
            with tempfile.TemporaryDirectory(prefix="kvkeep-") as scratch:
                file = Path(scratch, f"block{SUFFIX}")
                file.write_bytes(data)
                super().write(name, decode(file, name.key, {}))
            self._known.add(self._key(name))
            return True
        except BlockDamaged as error:
            log.warning("A block is removed from the bucket '%s': its file %s.", self.bucket.url, error)
            self.remove(name)
        except (OSError, ValueError, StoreError) as error:
            log.warning("A block is not fetched: %s", error)
            self._paused = time.monotonic() + PAUSE_S
        return False
