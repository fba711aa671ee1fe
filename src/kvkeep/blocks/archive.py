"""A session in one file, to be taken to another machine: a tar with its reference and its blocks.

The first member has the data of the reference, the number of saves, and the keys of the blocks that follow. Names and
modes of members say nothing about where an import writes.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from kvkeep.blocks.block_file import parse
from kvkeep.blocks.folder import SUFFIX, BlockName
from kvkeep.blocks.layout import NAME_OF_IDS
from kvkeep.blocks.names import session_key
from kvkeep.blocks.references import decode, encode
from kvkeep.blocks.sessions import check_about
from kvkeep.blocks.store import Store
from kvkeep.errors import BlockDamaged, KvkeepError, SessionDamaged, SessionError, StoreError, UsageError
from kvkeep.files import write_whole
from kvkeep.memory.rows import BLOCK
from kvkeep.units import size

FORMAT = 1
_HEADER = "session"
_MAX_SAVES = 2**31


def export(store: Store, name: str, target: Path) -> int:
    """Write a session as last saved to the new file ``target``; return how many of its blocks cannot be read, and are
    left out. Raises SessionError, and UsageError if there is a file."""
    if os.path.lexists(target):
        raise UsageError(f"There is already something at '{target}'; name another file.")
    while True:
        with store.read(name) as reference:
            about, mark, saves = reference.about, reference.mark, reference.generation
        try:
            check_about(about)
        except SessionDamaged as error:
            raise SessionDamaged(f"The session '{name}' cannot be exported: {error}") from error
        assert about is not None
        blocks = {key: BlockName(store.space(name), key) for key in (*about["blocks"], about["state"])}
        found = [key for key, block in blocks.items() if _content(store, block) is not None]
        with store.read(name) as reference:
            if reference.mark == mark:
                break  # otherwise the next turn was saved meanwhile, and this one's blocks are gone
    header = encode({"format": FORMAT, "saves": saves, "about": about, "blocks": found})

    def write(file: IO[bytes]) -> None:
        os.chmod(file.fileno() if os.chmod in os.supports_fd else file.name, 0o600)
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            _add(tar, _HEADER, header)
            for key in found:
                if (content := _content(store, blocks[key])) is None:
                    raise SessionError(f"The session '{name}' was changed while it was exported; repeat the command.")
                _add(tar, f"{key}{SUFFIX}", content)

    try:
        write_whole(target, write)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SessionError(f"The file '{target}' cannot be written: {reason}.") from error
    return len(blocks) - len(found)


def add(source: Path, store: Store, name: str) -> int:
    """Import the session in the file ``source`` under a new name; return how many of its blocks the file lacks.
    Everything is checked before anything is written. Raises SessionError, and UsageError if there is such a session."""
    store.path(name)
    with _opened(source) as tar:
        header = _header(tar)
        about, found = header["about"], header["blocks"]
        total = sum(len(content) for _, content in _checked(tar, about, found))
    if store.quota is not None and total > store.quota:
        raise SessionError(
            f"The session takes {size(total)}, more than the quota of {size(store.quota)}; name another folder."
        )
    with store.open(name) as reference, _opened(source) as tar:
        if reference.generation:
            raise UsageError(f"There is a session '{name}' already; give another name.")
        _header(tar)
        written: list[BlockName] = []
        try:
            state = about["state"]
            if store.blocks.has(
                BlockName(store.space(name), state)
            ):  # each session has its own: the next save removes it
                state = session_key()
            for key, content in _checked(tar, about, found):
                block = BlockName(store.space(name), state if key == about["state"] else key)
                if not store.blocks.has(block):
                    written.append(block)
                    store.blocks.write(block, parse(content, key))
            reference.generation = header["saves"] - 1
            reference.commit(about | {"state": state})
        except BaseException as error:
            reference.generation = 0
            for block in written:
                store.blocks.remove(block)
            if isinstance(error, StoreError):
                raise SessionError(f"The session cannot be imported: {error}") from error
            raise
    return len({*about["blocks"], about["state"]}) - len(found)


@contextmanager
def _opened(source: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive; errors in it are SessionError and SessionDamaged."""
    try:
        if not source.is_file():
            raise SessionError(f"There is no file '{source}'.")
        if source.stat().st_size % tarfile.RECORDSIZE:
            raise EOFError
        with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            yield tar
    except (tarfile.TarError, EOFError, ValueError, LookupError, TypeError, BlockDamaged) as error:
        if isinstance(error, KvkeepError) and not isinstance(error, BlockDamaged):
            raise
        raise SessionDamaged(f"'{source}' is damaged, or not a file of 'kvkeep cache export'.") from error
    except SessionDamaged as error:
        raise SessionDamaged(f"'{source}' cannot be imported: {error}") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SessionError(f"The file '{source}' cannot be read: {reason}.") from error


def _header(tar: tarfile.TarFile) -> dict[str, Any]:
    """Return the content of the first member."""
    header, _ = decode(bytes(_next(tar, _HEADER)))
    if header.get("format") != FORMAT:
        raise SessionDamaged("it is of another version of kvkeep.")
    about, found, saves = header["about"], header["blocks"], header["saves"]
    check_about(about)
    if type(saves) is not int or not 0 < saves < _MAX_SAVES:
        raise ValueError("a number of saves")
    if len({*found}) != len(found) or not {*found} <= {*about["blocks"], about["state"]}:
        raise ValueError("names of blocks")
    if any(len(row) != about["past"]["length"] for row in about["ids"]):
        raise ValueError("a number of ids")
    if len(about["blocks"]) > about["past"]["length"] // BLOCK:
        raise ValueError("a number of blocks")
    return header


def _checked(tar: tarfile.TarFile, about: dict[str, Any], found: list[str]) -> Iterator[tuple[str, bytearray]]:
    """Yield key and content of each block in the archive, after comparing checksums, its name and its token ids."""
    places = {key: number * BLOCK for number, key in enumerate(about["blocks"])}
    ids = torch.tensor(about["ids"], dtype=torch.int32)
    for key in found:
        content = _next(tar, f"{key}{SUFFIX}")
        tensors = parse(content, key)
        if (place := places.get(key)) is not None and not torch.equal(tensors[NAME_OF_IDS], ids[:, place:][:, :BLOCK]):
            raise ValueError("a block of another text")
        yield key, content
    if tar.next() is not None:
        raise ValueError("a further member")


def _next(tar: tarfile.TarFile, name: str) -> bytearray:
    """Return the content of the next member, which has this name."""
    member = tar.next()
    if member is None or member.name != name or not member.isreg() or member.issparse():
        raise ValueError("another member")
    file = tar.extractfile(member)
    assert file is not None
    if member.size > os.fstat(cast(IO[bytes], tar.fileobj).fileno()).st_size:  # reading would allocate this
        raise EOFError
    return bytearray(file.read())


def _add(tar: tarfile.TarFile, name: str, content: bytes | bytearray) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


def _content(store: Store, block: BlockName) -> bytearray | None:
    """Return the content of a block's file; None if it is missing or damaged."""
    with suppress(OSError, BlockDamaged):
        content = bytearray(store.blocks.path(block).read_bytes())
        parse(content, block.key)
        return content
    return None
