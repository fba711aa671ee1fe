"""A session in one file, to be taken to another machine: its reference, its blocks, and a digest of all of it. A text
that was read ahead has a list of its blocks in place of a reference.

A file begins with :data:`HEAD` (magic, and the bytes of the reference or the list). The blocks follow as in the store,
in order. Nothing in a file says where an import writes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, BinaryIO

from kvkeep.blocks.folder import BlockName, described, parse
from kvkeep.blocks.references import MAX_BYTES, MAX_GENERATION, checked, decode, encode
from kvkeep.blocks.store import Store, keys_of
from kvkeep.blocks.text import session_key
from kvkeep.budget import size
from kvkeep.errors import (
    BlockDamaged,
    KvkeepError,
    SessionDamaged,
    SessionError,
    SessionVersion,
    StoreError,
    UsageError,
    reason_of,
)
from kvkeep.files import open_file, write_whole

MAGIC, TEXT_MAGIC = b"kvsess03", b"kvtext01"
HEAD = struct.Struct("<8sQ")
"""Magic, and the bytes of the reference."""
_DIGEST_BYTES = 32
_TEXT_KEY = re.compile(r"[0-9a-f]{32}")


def export(store: Store, name: str, target: Path) -> int:
    """Write a session as last saved to the new file ``target``; return how many of its blocks cannot be read, and are
    left out. Raises SessionError, and UsageError if there is a file."""
    if os.path.lexists(target):
        raise UsageError(f"There is already something at '{target}'; name another file.")
    reference = store.read(name)
    try:
        about = checked(reference.about)
    except (SessionDamaged, SessionVersion) as error:
        raise type(error)(f"The session '{name}' cannot be exported: {error}") from error

    def check() -> None:
        if store.read(name).mark != reference.mark:  # its blocks may be gone
            raise SessionError(f"The session '{name}' was changed while it was exported; repeat the command.")

    names = [BlockName(store.space(name), key) for key in sorted(keys_of(about))]
    return _write(target, MAGIC, {"saves": reference.saves, "about": about}, store, names, check)


def export_text(store: Store, names: Sequence[BlockName], target: Path) -> int:
    """Write the blocks of a text to the new file ``target``; return as :func:`export`. names: the blocks in order.
    Raises SessionError, and UsageError if there is a file."""
    if os.path.lexists(target):
        raise UsageError(f"There is already something at '{target}'; name another file.")
    return _write(target, TEXT_MAGIC, {"blocks": [one.key for one in names]}, store, names, lambda: None)


def _write(
    target: Path,
    magic: bytes,
    about: dict[str, Any],
    store: Store,
    names: Sequence[BlockName],
    check: Callable[[], None],
) -> int:
    """Write a file; return how many of the blocks cannot be read. check: called after the last block."""
    written = 0

    def write(file: IO[bytes]) -> None:
        nonlocal written
        head, digest = encode(about), blake2b(digest_size=_DIGEST_BYTES)
        written = 0

        def put(part: bytes | bytearray) -> None:
            file.write(part)
            digest.update(part)

        put(HEAD.pack(magic, len(head)) + head)
        for name in names:
            if (content := _content(store, name)) is not None:
                put(content)
                written += 1
        file.write(digest.digest())
        check()

    try:
        write_whole(target, write)
    except OSError as error:
        raise SessionError(f"The file '{target}' cannot be written: {reason_of(error)}.") from error
    return len(names) - written


def add(source: Path, store: Store, name: str) -> int:
    """Import the session in the file ``source`` under a new name; return how many of its blocks the file lacks. A file
    that has changed since its export leaves nothing in the store. Raises SessionError, and UsageError if a session of
    this name exists."""
    store.path(name)
    with _explaining(source), _opened(source) as file:
        about, saves = _header(file)
        space, state = store.space(name), about["state"]
        _check_size(file, store, "session")
        with store.open(name) as reference:
            if reference.saves:
                raise UsageError(f"There is a session '{name}' already; give another name.")
            if store.blocks.size(BlockName(space, state)):  # each session has its own: the next save removes it
                state = session_key()
            names = {key: BlockName(space, key) for key in sorted(keys_of(about))}
            names[about["state"]] = BlockName(space, state)
            try:
                with _imported(file, store, names) as missing:
                    reference.saves = saves - 1
                    reference.commit(about | {"state": state})
            except BaseException:
                reference.discard()
                raise
    return len(missing)


def has_text(source: Path) -> bool:
    """Return whether a file has a text and no session. Raises SessionError if it cannot be read."""
    with _explaining(source), _opened(source) as file:
        return file.file.read(len(TEXT_MAGIC))[:6] == TEXT_MAGIC[:6]


def add_text(source: Path, store: Store, owner: str) -> tuple[int, int]:
    """Import the text in the file ``source`` for ``owner``; return the number of its blocks, and how many of them the
    file lacks. A file that has changed since its export leaves nothing in the store. Raises SessionError, and
    UsageError for an invalid owner."""
    store.path(f"{owner}/text")
    with _explaining(source), _opened(source) as file:
        keys = _head(file, TEXT_MAGIC)["blocks"]
        if not keys or not all(isinstance(key, str) and _TEXT_KEY.fullmatch(key) for key in keys):
            raise ValueError("names of blocks")
        _check_size(file, store, "text")
        store.create()
        with _imported(file, store, {key: BlockName(owner, key) for key in keys}) as missing:
            pass
    return len(keys), len(missing)


def _check_size(file: _Source, store: Store, what: str) -> None:
    """Raise SessionError if a file is larger than the quota."""
    if (quota := store.blocks.quota) is not None and file.end > quota:
        raise SessionError(
            f"The {what} takes {size(file.end)}, more than the quota of {size(quota)}; name another folder."
        )


@contextmanager
def _imported(file: _Source, store: Store, names: Mapping[str, BlockName]) -> Iterator[set[str]]:
    """Write the blocks of a file to the store; yield the keys of those that it lacks. names: the names in the store by
    keys, in order. If something raises, also within the block, remove them again."""
    missing, written = {*names}, list[BlockName]()
    try:
        for key, content in _blocks(file, [*names]):
            missing.remove(key)
            tensors = parse(content, key)
            if not store.blocks.size(names[key]):
                written.append(names[key])
                store.blocks.write(names[key], tensors, text=[*names.values()])
        file.check()
        yield missing
    except BaseException:
        for block in written:
            store.blocks.remove(block)
        raise


class _Source:
    """An exported file, which is read once and in order. Raises EOFError where it ends too early."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.end = file, os.fstat(file.fileno()).st_size - _DIGEST_BYTES
        self._digest = blake2b(digest_size=_DIGEST_BYTES)

    def read(self, count: int) -> bytearray:
        """Return the next ``count`` bytes."""
        if count > self.end - self.file.tell():  # before memory is taken for them
            raise EOFError
        content = bytearray(count)
        if self.file.readinto(content) != count:  # type: ignore[attr-defined]
            raise EOFError
        self._digest.update(content)
        return content

    def check(self) -> None:
        """Compare the digest of all that was read. Raises ValueError."""
        if self.file.read() != self._digest.digest():
            raise ValueError("another digest")


def _head(file: _Source, expected: bytes) -> dict[str, Any]:
    """Return what a file of the magic ``expected`` says before its blocks."""
    magic, count = HEAD.unpack(file.read(HEAD.size))
    if magic[:6] != expected[:6]:
        raise ValueError("another magic")
    if magic != expected:
        raise SessionVersion("it is of another version of kvkeep; import it with that version.")
    if count > MAX_BYTES:
        raise ValueError("a size")
    return decode(bytes(file.read(count)))[0]


def _header(file: _Source) -> tuple[dict[str, Any], int]:
    """Return the data of the reference and its number of saves."""
    header = _head(file, MAGIC)
    about, saves = checked(header["about"]), header["saves"]
    if type(saves) is not int or not 0 < saves <= MAX_GENERATION:
        raise ValueError("a number of saves")
    return about, saves


def _blocks(file: _Source, keys: Sequence[str]) -> Iterator[tuple[str, bytearray]]:
    """Yield name and content of each block: in the order of ``keys``, and no others."""
    expected = iter(keys)
    while (place := file.file.tell()) < file.end:
        name, count = described(file.file)
        if name not in expected:  # it also takes the keys before it, which the file lacks
            raise ValueError("another block")
        file.file.seek(place)
        yield name, file.read(count)


@contextmanager
def _opened(source: Path) -> Iterator[_Source]:
    """Open a file that is there. Raises SessionError and OSError."""
    if not source.is_file():  # opening a pipe would wait
        raise SessionError(f"There is no file '{source}'.")
    with source.open("rb") as file:
        yield _Source(file)


@contextmanager
def _explaining(source: Path) -> Iterator[None]:
    """Raise errors of an archive as SessionError and SessionDamaged, which name it."""
    try:
        yield
    except (SessionDamaged, BlockDamaged) as error:
        why = str(error) if isinstance(error, SessionDamaged) else "a block is damaged."
        raise SessionDamaged(f"'{source}' cannot be imported: {why}") from error
    except SessionVersion as error:
        raise SessionVersion(f"'{source}' cannot be imported: {error}") from error
    except StoreError as error:
        raise SessionError(f"The session cannot be imported: {error}") from error
    except KvkeepError:
        raise
    except MemoryError as error:
        raise SessionError(f"'{source}' cannot be imported: there is not enough memory for its blocks.") from error
    except (EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise SessionDamaged(f"'{source}' is damaged, or not a file of 'kvkeep cache export'.") from error
    except OSError as error:
        raise SessionError(f"The file '{source}' cannot be read: {reason_of(error)}.") from error


def _content(store: Store, block: BlockName) -> bytearray | None:
    """Return the content of a block's file; None if it is missing or damaged."""
    with suppress(OSError, StoreError), os.fdopen(open_file(store.blocks.path(block)), "rb") as file:
        content = bytearray(file.read())
        parse(content, block.key)
        return content
    return None
