"""A session in one file, to be taken to another machine: a tar with its blocks, and its reference at the end.

The last member has the data of the reference, the number of saves, and the keys of the blocks before it. So a file that
was cut is noticed. Only files that are laid out as :func:`export` lays them out are read: plain members of tar's format
USTAR, without extensions, links or holes. Names and modes of members say nothing about where an import writes.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from kvkeep.blocks.block_file import length_of, parse
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.header import checked
from kvkeep.blocks.names import session_key
from kvkeep.blocks.references import MAX_BYTES, MAX_GENERATION, decode, encode
from kvkeep.blocks.store import Store, keys_of
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
from kvkeep.files import write_whole
from kvkeep.units import size

FORMAT = 2
_REFERENCE = "session"
_NAME = re.compile(rb"([0-9a-fx][0-9a-f]{31}|session)\0+")
_SIZE = re.compile(rb"[0-7]{11}\0")
_CHECKSUM = re.compile(rb"[0-7]{6}\0 ")


class _Found(NamedTuple):
    """What an archive has, after all checks."""

    about: dict[str, Any]
    """The data of the reference."""
    saves: int
    digests: dict[str, bytes]
    """A digest of each member, by name, in order."""
    bytes: int
    """Bytes of all blocks."""


def export(store: Store, name: str, target: Path) -> int:
    """Write a session as last saved to the new file ``target``; return how many of its blocks cannot be read, and are
    left out. Raises SessionError, and UsageError if there is a file."""
    if os.path.lexists(target):
        raise UsageError(f"There is already something at '{target}'; name another file.")
    with store.read(name) as reference:
        found = list[str]()
    try:
        about = checked(reference.about)
    except (SessionDamaged, SessionVersion) as error:
        raise type(error)(f"The session '{name}' cannot be exported: {error}") from error

    def write(file: IO[bytes]) -> None:
        found.clear()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for key in sorted(keys_of(about)):
                if (content := _content(store, BlockName(store.space(name), key))) is not None:
                    _add(tar, key, content)
                    found.append(key)
            _add(
                tar,
                _REFERENCE,
                encode({"format": FORMAT, "saves": reference.saves, "about": about, "blocks": found}),
            )
        with store.read(name) as again:
            if again.mark != reference.mark:  # its blocks may be gone
                raise SessionError(f"The session '{name}' was changed while it was exported; repeat the command.")

    try:
        write_whole(target, write, private=True)
    except OSError as error:
        raise SessionError(f"The file '{target}' cannot be written: {reason_of(error)}.") from error
    return len(keys_of(about)) - len(found)


def add(source: Path, store: Store, name: str) -> int:
    """Import the session in the file ``source`` under a new name; return how many of its blocks the file lacks.
    Everything is checked before anything is written. Raises SessionError, and UsageError if there is such a session."""
    store.path(name)
    with _explaining(source), _opened(source) as (file, length):
        found = _checked(file, length)
        about, space, state = found.about, store.space(name), found.about["state"]
        if store.quota is not None and found.bytes > store.quota:
            raise SessionError(
                f"The session takes {size(found.bytes)}, more than the quota of {size(store.quota)}; name another "
                "folder."
            )
        with store.open(name) as reference:
            if reference.saves:
                raise UsageError(f"There is a session '{name}' already; give another name.")
            if store.blocks.size(BlockName(space, state)):  # each session has its own: the next save removes it
                state = session_key()
            written = list[BlockName]()
            try:
                for key, content in _same_members(file, length, found.digests):
                    block = BlockName(space, state if key == about["state"] else key)
                    if key != _REFERENCE and not store.blocks.size(block):
                        written.append(block)
                        store.blocks.write(block, parse(content, key))
                reference.saves = found.saves - 1
                reference.commit(about | {"state": state})
            except BaseException:
                reference.discard()
                for block in written:
                    store.blocks.remove(block)
                raise
    return len(keys_of(about)) - len(found.digests) + 1


def _checked(file: BinaryIO, length: int) -> _Found:
    """Return what an archive has, after comparing all checksums and names."""
    digests, total, header = dict[str, bytes](), 0, dict[str, Any]()
    for key, content in _members(file, length):
        if header or key in digests:
            raise ValueError("a further member")
        digests[key] = blake2b(content).digest()
        if key == _REFERENCE:
            header, _ = decode(bytes(content))
        else:
            parse(content, key)
            total += len(content)
    if header["format"] != FORMAT:
        raise SessionDamaged("it is of another version of kvkeep.")
    about, saves = checked(header["about"]), header["saves"]
    if type(saves) is not int or not 0 < saves <= MAX_GENERATION:
        raise ValueError("a number of saves")
    if [*digests][:-1] != header["blocks"] or not {*header["blocks"]} <= keys_of(about):
        raise ValueError("names of blocks")
    return _Found(about, saves, digests, total)


def _same_members(file: BinaryIO, length: int, digests: dict[str, bytes]) -> Iterator[tuple[str, bytearray]]:
    """Yield the members of an archive a second time. Raises SessionError if they are others than at first."""
    for key, content in _members(file, length):
        if blake2b(content).digest() != digests.get(key):
            raise SessionError("The file was changed while it was imported; repeat the command.")
        yield key, content


def _members(file: BinaryIO, length: int) -> Iterator[tuple[str, bytearray]]:
    """Yield name and content of each member of an archive of ``length`` bytes. Raises ValueError for another layout
    than tarfile writes."""
    place = 0
    file.seek(0)
    while any(header := _read(file, tarfile.BLOCKSIZE)):
        name, count = _described(header)
        place += tarfile.BLOCKSIZE
        after = place + count + -count % tarfile.BLOCKSIZE
        if after > length or (name == _REFERENCE and count > MAX_BYTES):
            raise ValueError("a size")
        if name != _REFERENCE:  # before memory is taken for it
            if length_of(file) != count:
                raise ValueError("a block of another size")
            file.seek(place)
        content = _read(file, count)
        if any(_read(file, after - place - count)):
            raise ValueError("something between members")
        yield name, content
        place = after
    end = place + 2 * tarfile.BLOCKSIZE
    if length != end + -end % tarfile.RECORDSIZE or any(file.read(tarfile.RECORDSIZE)):
        raise ValueError("something after the members")


def _described(header: bytes | bytearray) -> tuple[str, int]:
    """Return the name and the bytes of a member. Raises ValueError for another header than those of :func:`export`."""
    name, count, check = _NAME.fullmatch(header[:100]), _SIZE.fullmatch(header[124:136]), header[148:156]
    if not (name and count and _CHECKSUM.fullmatch(check)):
        raise ValueError("a header")
    if sum(header) - sum(check) + len(check) * ord(" ") != int(check[:6], 8):
        raise ValueError("a checksum")
    if header[156:157] != tarfile.REGTYPE or any(header[157:257]) or header[257:265] != b"ustar\x0000":
        raise ValueError("another kind of member")
    if any(header[345:]):
        raise ValueError("a prefix")
    return name[1].decode(), int(count[0][:-1], 8)


def _read(file: BinaryIO, count: int) -> bytearray:
    content = bytearray(count)
    if file.readinto(content) != count:  # type: ignore[attr-defined]
        raise EOFError
    return content


@contextmanager
def _opened(source: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open an archive, not waiting for one; yield it and its bytes. Raises SessionError and OSError."""
    try:
        handle = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SessionError(f"There is no file '{source}'.") from error
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise SessionError(f"There is no file '{source}'.")
    with os.fdopen(handle, "rb") as file:
        yield file, facts.st_size


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


def _add(tar: tarfile.TarFile, name: str, content: bytes | bytearray) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


def _content(store: Store, block: BlockName) -> bytearray | None:
    """Return the content of a block's file; None if it is missing or damaged."""
    with suppress(OSError, StoreError):
        content = store.blocks.content(block)
        parse(content, block.key)
        return content
    return None
