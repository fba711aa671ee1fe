"""A session in one file, to be taken to another machine: a tar with its blocks, and its reference at the end.

The last member has the data of the reference, the number of saves, and the keys of the blocks before it. So a file that
was cut is noticed. Names and modes of members say nothing about where an import writes.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kvkeep.blocks.block_file import parse
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.header import checked
from kvkeep.blocks.names import session_key
from kvkeep.blocks.references import decode, encode
from kvkeep.blocks.store import Store, keys_of
from kvkeep.errors import BlockDamaged, KvkeepError, SessionDamaged, SessionError, StoreError, UsageError, reason_of
from kvkeep.files import write_whole
from kvkeep.units import size

FORMAT = 2
_REFERENCE = "session"
_MAX_SAVES = 2**31


def export(store: Store, name: str, target: Path) -> int:
    """Write a session as last saved to the new file ``target``; return how many of its blocks cannot be read, and are
    left out. Raises SessionError, and UsageError if there is a file."""
    if os.path.lexists(target):
        raise UsageError(f"There is already something at '{target}'; name another file.")
    with store.read(name) as reference:
        found = list[str]()
    try:
        about = checked(reference.about)
    except SessionDamaged as error:
        raise SessionDamaged(f"The session '{name}' cannot be exported: {error}") from error

    def write(file: IO[bytes]) -> None:
        os.chmod(file.fileno() if os.chmod in os.supports_fd else file.name, 0o600)
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
        write_whole(target, write)
    except OSError as error:
        raise SessionError(f"The file '{target}' cannot be written: {reason_of(error)}.") from error
    return len(keys_of(about)) - len(found)


def add(source: Path, store: Store, name: str) -> int:
    """Import the session in the file ``source`` under a new name; return how many of its blocks the file lacks.
    Everything is checked before anything is written. Raises SessionError, and UsageError if there is such a session."""
    store.path(name)
    with _explaining(source):
        about, saves, found, total = _checked(source)
    if store.quota is not None and total > store.quota:
        raise SessionError(
            f"The session takes {size(total)}, more than the quota of {size(store.quota)}; name another folder."
        )
    space, state, written = store.space(name), about["state"], list[BlockName]()
    with store.open(name) as reference, _explaining(source):
        if reference.saves:
            raise UsageError(f"There is a session '{name}' already; give another name.")
        if store.blocks.size(BlockName(space, state)):  # each session has its own: the next save removes it
            state = session_key()
        try:
            for key, content in _members(source):
                block = BlockName(space, state if key == about["state"] else key)
                if key != _REFERENCE and not store.blocks.size(block):
                    written.append(block)
                    store.blocks.write(block, parse(content, key))
            reference.saves = saves - 1
            reference.commit(about | {"state": state})
        except BaseException:
            for block in written:
                store.blocks.remove(block)
            raise
    return len(keys_of(about)) - found


def _checked(source: Path) -> tuple[dict[str, Any], int, int, int]:
    """Return the data of the reference in an archive, the number of saves, and number and bytes of the blocks, after
    comparing all checksums and names."""
    sizes, header = dict[str, int](), dict[str, Any]()
    for key, content in _members(source):
        if header or key in sizes:
            raise ValueError("a further member")
        if key == _REFERENCE:
            header, _ = decode(bytes(content))
        else:
            parse(content, key)
            sizes[key] = len(content)
    if header["format"] != FORMAT:
        raise SessionDamaged("it is of another version of kvkeep.")
    about, saves = checked(header["about"]), header["saves"]
    if type(saves) is not int or not 0 < saves < _MAX_SAVES:
        raise ValueError("a number of saves")
    if [*sizes] != header["blocks"] or not {*sizes} <= keys_of(about):
        raise ValueError("names of blocks")
    return about, saves, len(sizes), sum(sizes.values())


def _members(source: Path) -> Iterator[tuple[str, bytearray]]:
    """Yield name and content of each member of an archive."""
    if not source.is_file():
        raise SessionError(f"There is no file '{source}'.")
    length = source.stat().st_size
    with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if not member.isreg() or member.issparse() or member.size > length:  # reading would allocate this
                raise ValueError("another kind of member")
            content = tar.extractfile(member)
            assert content is not None
            yield member.name, bytearray(content.read())


@contextmanager
def _explaining(source: Path) -> Iterator[None]:
    """Raise errors of an archive as SessionError and SessionDamaged, which name it."""
    try:
        yield
    except (SessionDamaged, BlockDamaged) as error:
        why = str(error) if isinstance(error, SessionDamaged) else "a block is damaged."
        raise SessionDamaged(f"'{source}' cannot be imported: {why}") from error
    except StoreError as error:
        raise SessionError(f"The session cannot be imported: {error}") from error
    except KvkeepError:
        raise
    except (tarfile.TarError, EOFError, ValueError, LookupError, TypeError) as error:
        raise SessionDamaged(f"'{source}' is damaged, or not a file of 'kvkeep cache export'.") from error
    except OSError as error:
        raise SessionError(f"The file '{source}' cannot be read: {reason_of(error)}.") from error


def _add(tar: tarfile.TarFile, name: str, content: bytes | bytearray) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


def _content(store: Store, block: BlockName) -> bytearray | None:
    """Return the content of a block's file; None if it is missing or damaged."""
    with suppress(OSError, BlockDamaged):
        content = store.blocks.content(block)
        parse(content, block.key)
        return content
    return None
