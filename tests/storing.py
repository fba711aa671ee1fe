"""Sessions of a tiny model whose bits are the kernels', for the tests of the store."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import cache as memoised
from pathlib import Path
from typing import Any

import torch
from conftest import saved
from families import tiny
from helpers import prompt, step
from torch import Tensor

from kvkeep import KeepCache, KvkeepError, Session, load
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store

TURNS = (300, 530)
"""Tokens in the cache after each turn: one block and a part of one, two blocks and a part."""
LENGTH = TURNS[-1]
IDS = prompt(1, LENGTH + 40, seed=11)
METHODS: dict[str, tuple[Any, ...]] = {
    "full": ("full", None, {}),
    "kv-direct": ("kv-direct", 64, {"checkpoint": "kv", "where": "host"}),
    "h2o": ("h2o", 64, {}),
}


@memoised
def model() -> Any:
    """A tiny model in bfloat16, which the kernels run; for tests with the fixture ``kernels``."""
    with tempfile.TemporaryDirectory() as folder:
        return load(str(saved(tiny("llama", 2, 2048), Path(folder))), weights="bfloat16", device="cpu").model


def new_cache(name: str) -> KeepCache:
    method, budget, options = METHODS[name]
    return KeepCache(model(), method, budget, **options)


def filled(name: str, length: int = LENGTH) -> KeepCache:
    """Return a cache that has read the first ``length`` tokens at once."""
    cache = new_cache(name)
    step(model(), cache, IDS[:, :length])
    return cache


@memoised
def following(name: str, length: int = LENGTH) -> Tensor:
    """Return the logits of three tokens after the first ``length``."""
    return next_logits(filled(name, length))


def next_logits(cache: KeepCache) -> Tensor:
    length = cache.get_seq_length()
    return step(model(), cache, IDS[:, length : length + 3], logits_to_keep=0)


def session(cache: KeepCache, **notes: Any) -> Session:
    return Session(cache, IDS[:, : cache.get_seq_length()].tolist(), notes, "tokenizer")


@memoised
def kept(name: str, length: int = LENGTH) -> KeepCache:
    """Return a cache that has read the first ``length`` tokens, to be saved and not to go on."""
    return filled(name, length)


def store_text(store: Store, session_name: str, name: str, length: int = LENGTH) -> None:
    with StoredSession(store, session_name, writing=True) as stored:
        stored.save(session(kept(name, length), length=length))


def check_whole(store: Store, session_name: str, name: str) -> int:
    """Check that a session goes on with the bits it would have had; return its tokens, all from blocks."""
    with StoredSession(store, session_name) as stored:
        loaded, about = stored.load(model(), "tokenizer"), stored.about
    assert about is not None
    length = loaded.cache.get_seq_length()
    assert length == about["past"]["length"] == loaded.notes["length"] and loaded.ids == IDS[:, :length].tolist()
    assert torch.equal(next_logits(loaded.cache), following(name, length))
    return length


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def block_bytes(store: Store) -> int:
    return sum(path.stat().st_size for path in files(store.folder) if path.suffix == ".block")


# -- faults -----------------------------------------------------------------------------------------------

_EVENTS = {
    *("open", "mmap.__new__", "fcntl.flock"),
    *(f"os.{name}" for name in "link rename remove mkdir rmdir utime chmod listdir scandir".split()),  # noqa: SIM905
}
SAVED, REFUSED, UNREACHED = 0, 3, 4
"""Exit codes of :func:`with_fault`: done, refused by a sentence, and done before the fault's turn came."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> Callable[[], None]:
    def raising() -> None:
        raise OSError(number, os.strerror(number))

    return raising


full_disk, io_error = fail(errno.ENOSPC), fail(errno.EIO)
FAULTS = {
    errno.errorcode[one]: fail(one) for one in (errno.EROFS, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENOENT)
}
"""Further faults, by the names of their numbers."""


def with_fault(run: Callable[[], object], at: int, fault: Callable[[], None]) -> None:
    """Run ``run`` in this process, which is a fork and ends with it; ``fault`` happens before its ``at``-th operation
    on files, and only then."""
    count = 0

    def noticed() -> None:
        nonlocal count
        count += 1
        if count == at:
            fault()

    def noticing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            noticed()
            return call(*given, **named)

        return called

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and not (event == "open" and "/proc/" in str(arguments[0])):
            noticed()

    for name in ("fsync", "stat", "lstat", "fstat"):  # without events
        setattr(os, name, noticing(getattr(os, name)))
    sys.addaudithook(hook)
    try:
        run()
    except KvkeepError as error:
        print(error, file=sys.stderr)
        os._exit(REFUSED)
    os._exit(SAVED if count >= at else UNREACHED)
