"""A session in one file, to be taken to another machine: its reference, its blocks, and a digest of all of it.

A file begins with :data:`HEAD` (magic, and the bytes of the reference). The blocks follow as in the store, by name.
Nothing in a file says where an import writes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, BinaryIO

from kvkeep.blocks.block_file import described, parse
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.names import session_key
from kvkeep.blocks.references import MAX_BYTES, MAX_GENERATION, checked, decode, encode
from kvkeep.blocks.store import Store, keys_of
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
from kvkeep.files.atomic import write_whole
from kvkeep.files.private import open_file

MAGIC = b"kvsess03"
HEAD = struct.Struct("<8sQ")
"""Magic, and the bytes of the reference."""
_DIGEST_BYTES = 32
_PIECE_BYTES = 2**20


def export(store: Store, name: str, target: Path) -> int:
    """Write a session as last saved to the new file ``target``; return how many of its blocks cannot be read, and are
    left out. Raises SessionError, and UsageError if there is a file."""
    if os.path.lexists(target):
        raise UsageError(f"There is already something at '{target}'; name another file.")
    reference, written = store.read(name), 0
    try:
        about = checked(reference.about)
    except (SessionDamaged, SessionVersion) as error:
        raise type(error)(f"The session '{name}' cannot be exported: {error}") from error

    def write(file: IO[bytes]) -> None:
        nonlocal written
        head, digest = encode({"saves": reference.saves, "about": about}), blake2b(digest_size=_DIGEST_BYTES)
        written = 0

        def put(part: bytes | bytearray) -> None:
            file.write(part)
            digest.update(part)

        put(HEAD.pack(MAGIC, len(head)) + head)
        for key in sorted(keys_of(about)):
            if (content := _content(store, BlockName(store.space(name), key))) is not None:
                put(content)
                written += 1
        file.write(digest.digest())
        if store.read(name).mark != reference.mark:  # its blocks may be gone
            raise SessionError(f"The session '{name}' was changed while it was exported; repeat the command.")

    try:
        write_whole(target, write, private=True)
    except OSError as error:
        raise SessionError(f"The file '{target}' cannot be written: {reason_of(error)}.") from error
    return len(keys_of(about)) - written


def add(source: Path, store: Store, name: str) -> int:
    """Import the session in the file ``source`` under a new name; return how many of its blocks the file lacks.
    Everything is checked before anything is written. Raises SessionError, and UsageError if there is such a session."""
    store.path(name)
    with _explaining(source), _opened(source) as (file, length):
        about, saves = _checked(file, length)
        space, state = store.space(name), about["state"]
        if store.quota is not None and length > store.quota:
            raise SessionError(
                f"The session takes {size(length)}, more than the quota of {size(store.quota)}; name another folder."
            )
        with store.open(name) as reference:
            if reference.saves:
                raise UsageError(f"There is a session '{name}' already; give another name.")
            if store.blocks.size(BlockName(space, state)):  # each session has its own: the next save removes it
                state = session_key()
            missing, written = keys_of(about), list[BlockName]()
            try:
                for key, content in _blocks(file, length, about):
                    block = BlockName(space, state if key == about["state"] else key)
                    missing.remove(key)
                    if not store.blocks.size(block):
                        written.append(block)
                        store.blocks.write(block, parse(content, key))
                reference.saves = saves - 1
                reference.commit(about | {"state": state})
            except BaseException:
                reference.discard()
                for block in written:
                    store.blocks.remove(block)
                raise
    return len(missing)


def _checked(file: BinaryIO, length: int) -> tuple[dict[str, Any], int]:
    """Return the data of the reference and its number of saves, after reading all blocks and comparing all
    checksums."""
    header, digest = _header(file, length), blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    for place in range(0, length - _DIGEST_BYTES, _PIECE_BYTES):
        digest.update(_read(file, min(_PIECE_BYTES, length - _DIGEST_BYTES - place)))
    if _read(file, _DIGEST_BYTES) != digest.digest():
        raise ValueError("another digest")
    about, saves = checked(header["about"]), header["saves"]
    if type(saves) is not int or not 0 < saves <= MAX_GENERATION:
        raise ValueError("a number of saves")
    for key, content in _blocks(file, length, about):
        parse(content, key)
    return about, saves


def _header(file: BinaryIO, length: int) -> dict[str, Any]:
    """Return the data of the reference; leave ``file`` at the first block."""
    file.seek(0)
    magic, count = HEAD.unpack(_read(file, HEAD.size))
    if magic[:6] != MAGIC[:6]:
        raise ValueError("another magic")
    if magic != MAGIC:
        raise SessionVersion("it is of another version of kvkeep; import it with that version.")
    if count > min(MAX_BYTES, length):
        raise ValueError("a size")
    return decode(bytes(_read(file, count)))[0]


def _blocks(file: BinaryIO, length: int, about: dict[str, Any]) -> Iterator[tuple[str, bytearray]]:
    """Yield name and content of each block: in order, and none but those of the reference."""
    _header(file, length)
    keys, last, place = keys_of(about), "", file.tell()
    while place < length - _DIGEST_BYTES:
        name, count = described(file)
        if place + count > length - _DIGEST_BYTES or name not in keys or name <= last:
            raise ValueError("another block")
        file.seek(place)
        yield name, _read(file, count)
        last, place = name, place + count
        file.seek(place)


def _read(file: BinaryIO, count: int) -> bytearray:
    content = bytearray(count)
    if file.readinto(content) != count:  # type: ignore[attr-defined]
        raise EOFError
    return content


@contextmanager
def _opened(source: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file that is there, and yield it and its bytes. Raises SessionError and OSError."""
    if not source.is_file():  # opening a pipe would wait
        raise SessionError(f"There is no file '{source}'.")
    with source.open("rb") as file:
        yield file, os.fstat(file.fileno()).st_size


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
