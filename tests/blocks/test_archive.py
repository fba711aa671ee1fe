"""Whatever a file is that is imported: a session as its blocks say, or one sentence; and nothing outside the store."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import random
import resource
import shutil
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storing import TURNS, check_whole, files, model, store_text

from kvkeep import KvkeepError, SessionError
from kvkeep.blocks import archive
from kvkeep.blocks.block_file import HEADER, checksum, parse
from kvkeep.blocks.references import decode, encode
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.errors import SessionDamaged

pytestmark = pytest.mark.usefixtures("kernels")
NAME = "me/talk"
Members = list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The archives of a session of an exact method and one of a lossy one."""
    folder, made = tmp_path_factory.mktemp("exported"), {}
    for name in ("kv-direct", "h2o"):
        store_text(Store(folder / name), NAME, name)
        assert archive.export(Store(folder / name), NAME, folder / f"{name}.tar") == 0
        made[name] = (folder / f"{name}.tar").read_bytes()
    return made


def members(data: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(one.name, tar.extractfile(one).read()) for one in tar]  # type: ignore[union-attr]


def packed(content: Members, change: Callable[[tarfile.TarInfo], object] = lambda _: None, at: int = -1) -> bytes:
    """Return an archive; ``change`` changes the header of member ``at``."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number, (name, own) in enumerate(content):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(own), 0o600
            if number == at:
                change(info)
            tar.addfile(info, io.BytesIO(own))
    return file.getvalue()


def summed(header: bytes) -> bytes:
    """Return a header with the right checksum."""
    total = sum(header[:148]) + sum(header[156:512]) + 8 * ord(" ")
    return header[:148] + b"%06o\0 " % total + header[156:]


FIELDS = {
    "name": (0, 100),
    "mode": (100, 108),
    "size": (124, 136),
    "kind": (156, 157),
    "link": (157, 257),
    "magic": (257, 265),
    "prefix": (345, 500),
}
VALUES = {
    "name": (
        b"../../evil",
        b"/etc/evil",
        b"x" * 100,
        b"\xff" * 32,
        b"session\0x",
        b"0" * 32 + b"/..",
        b"",
        b"./session",
    ),
    "mode": (b"0007777\0", b"-1", b"\x80" + b"\xff" * 7),
    "size": (
        b"\x80" + b"\xff" * 11,
        b"\xff" * 12,
        b"-0000000001\0",
        b"77777777777\0",
        b"00000000000\0",
        b" 12 ",
        b"0x10",
    ),
    "kind": tuple(bytes([one]) for one in b"12345678SLKgxDVM\0\xff"),
    "link": (b"/etc/passwd", b"../x"),
    "magic": (b"ustar  \0", b"ustar\x0001", bytes(8)),
    "prefix": (b"../..", b"/", b"x" * 155),
}


def header_changed(data: bytes, draw: random.Random) -> bytes:
    """Change a field of a member's header, and the header's checksum."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        place = draw.choice([one.offset for one in tar])
    field = draw.choice([*FIELDS])
    start, end = FIELDS[field]
    value = draw.choice(VALUES[field]).ljust(end - start, b"\0")[: end - start]
    header = data[place : place + 512]
    return data[:place] + summed(header[:start] + value + header[end:]) + data[place + 512 :]


def block_changed(data: bytes, draw: random.Random) -> bytes:
    """Change a block's bytes or description, and its checksums."""
    found = members(data)
    number = draw.randrange(len(found) - 1)
    name, content = found[number]
    magic, length, _ = HEADER.unpack_from(content)
    about, start = json.loads(content[HEADER.size : HEADER.size + length]), -(-(HEADER.size + length) // 64) * 64
    body = bytearray(content[start:])
    for _ in range(draw.choice((1, 1, 100))):
        body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    about["checksum"] = checksum(np.frombuffer(body, np.uint8))
    if draw.random() < 0.5:
        about = json_changed(about, draw)
    description = json.dumps(about).encode()
    head = HEADER.pack(draw.choice((magic, magic, magic, b"kvblock2")), len(description), zlib.crc32(description))
    head += description
    found[number] = (name, head + bytes(-len(head) % 64) + bytes(body))
    return packed(found)


NUMBERS: tuple[Any, ...] = (-1, 0, 1, 2**31, 2**63, 2**64, -(2**80), 10**400, 1e308, 1.5, True, None, "", "x", [], {})


def json_changed(value: Any, draw: random.Random) -> Any:
    """Change one thing somewhere within plain data."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        name = draw.choice([*value])
        if draw.random() < 0.1:
            return {one: own for one, own in value.items() if one != name}
        if draw.random() < 0.05:
            return value | {f"{name}x": 1}
        return value | {name: json_changed(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        return [*value[:place], json_changed(value[place], draw), *value[place + 1 :]]
    return draw.choice((*NUMBERS, *((value + 1, value - 1) if type(value) is int else ())))


def reference_changed(data: bytes, draw: random.Random) -> bytes:
    """Change the reference, and its checksum."""
    found = members(data)
    header, _ = decode(found[-1][1])
    if draw.random() < 0.1:
        depth = draw.choice((100, 900, 990, 100_000))
        text = json.dumps(header | {"about": 0})
        inner = json.dumps(header["about"] | {"notes": 0})
        inner = inner.replace('"notes": 0', '"notes": {"x":' + "[" * depth + "]" * depth + "}")
        return packed([*found[:-1], ("session", sealed(text.replace('"about": 0', f'"about": {inner}').encode()))])
    return packed([*found[:-1], ("session", encode(json_changed(header, draw)))])


def sealed(data: bytes) -> bytes:
    return data + b"\n" + blake2b(data, digest_size=16).hexdigest().encode()


def extended(data: bytes, draw: random.Random) -> bytes:
    """Add members of other kinds, or extensions, or pack it otherwise."""
    found = members(data)
    at = draw.randrange(len(found) + 1)
    kinds: dict[str, Callable[[], bytes]] = {
        "long names": lambda: found_with(found, at, [("x" * 200 + str(n), b"") for n in range(3000)]),
        "gnu's long names": lambda: b"".join(long_name(number) for number in range(3000)) + data,
        "pax": lambda: packed(found, lambda one: one.pax_headers.update(comment="x" * draw.choice((1, 10**6))), 0),
        "pax size": lambda: packed(found, lambda one: one.pax_headers.update(size=str(2**80)), 0),
        "sparse": lambda: packed(found, lambda one: one.pax_headers.update({"GNU.sparse.map": "0,1"}), 0),
        "link": lambda: found_with(found, at, [], tarfile.SYMTYPE, "/etc/passwd"),
        "hard link": lambda: found_with(found, at, [], tarfile.LNKTYPE, found[0][0]),
        "device": lambda: found_with(found, at, [], tarfile.CHRTYPE, ""),
        "pipe": lambda: found_with(found, at, [], tarfile.FIFOTYPE, ""),
        "many": lambda: found_with(found, at, [(f"{n:032x}", b"") for n in range(5000)]),
        "twice": lambda: data + data,
        "again": lambda: packed([*found[:-1], found[0], found[-1]]),
        "two references": lambda: packed([*found, found[-1]]),
        "no reference": lambda: packed(found[:-1]),
        "without a block": lambda: packed(found[1:]),
        "other order": lambda: packed(draw.sample(found, len(found))),
        "gzip": lambda: gzip.compress(data, 1),
        "bz2": lambda: bz2.compress(data, 1),
        "xz": lambda: lzma.compress(data, preset=0),
        "longer": lambda: data + bytes(draw.choice((1, 512, 10240, 10**6))),
        "name swapped": lambda: packed([(found[0][0], found[1][1]), *found[1:]]),
    }
    return kinds[draw.choice([*kinds])]()


def long_name(number: int) -> bytes:
    info = tarfile.TarInfo("@LongLink")
    info.size, info.type = 512, tarfile.GNUTYPE_LONGNAME
    return info.tobuf(tarfile.GNU_FORMAT) + b"x" * 511 + b"\0"


def found_with(found: Members, at: int, more: Members, kind: bytes | None = None, link: str = "") -> bytes:
    if kind is None:
        return packed([*found[:at], *more, *found[at:]])

    def change(info: tarfile.TarInfo) -> None:
        info.type, info.linkname, info.size = kind, link, 0

    return packed([*found[:at], ("f" * 32, b""), *found[at:]], change, at)


def bytes_changed(data: bytes, draw: random.Random) -> bytes:
    changed, kind = bytearray(data), draw.choice(("flip", "flip", "cut", "insert", "delete", "zero", "move"))
    start = draw.choice((draw.randrange(len(data)), draw.randrange(len(data)) // 512 * 512, draw.randrange(600)))
    count = draw.choice((1, 2, 8, 512, 513, 10240))
    match kind:
        case "flip":
            for _ in range(draw.choice((1, 1, 2, 50))):
                changed[draw.randrange(len(data)) if draw.random() < 0.5 else start] ^= 1 << draw.randrange(8)
        case "cut":
            del changed[start:]
        case "insert":
            changed[start:start] = draw.choice((bytes(count), draw.randbytes(count)))
        case "delete":
            del changed[start : start + count]
        case "zero":
            changed[start : start + count] = bytes(len(changed[start : start + count]))
        case "move":
            changed = changed[start:] + changed[:start]
    return bytes(changed)


CHANGES = {
    "bytes": bytes_changed,
    "header": header_changed,
    "block": block_changed,
    "reference": reference_changed,
    "kinds": extended,
}


def entries(name: str, content: bytes) -> dict[str, Any]:
    """Return dtype, shape and bytes of the tensors of a block's file."""
    found = parse(bytearray(content), name)
    return {key: (one.dtype, one.shape, one.flatten().view(torch.uint8).tolist()) for key, one in found.items()}


def tried(data: bytes, folder: Path, crafted: bool, name: str) -> str:
    """Import an archive into a new store; return what came of it. crafted: its checksums are right whatever it has."""
    source, store = folder / "in.tar", Store(folder / "store", quota=None)
    source.write_bytes(data)
    shutil.rmtree(store.folder, ignore_errors=True)
    others, began = sorted(os.listdir(folder)), time.monotonic()
    try:
        missing = archive.add(source, store, NAME)
    except KvkeepError as error:
        assert len(str(error).splitlines()) == 1 and isinstance(error, SessionError), error
        assert not [path for path in files(store.folder) if path.suffix in (".block", ".json")]
        outcome = type(error).__name__
    else:
        with StoredSession(store, NAME) as stored:
            assert stored.about is not None
            keys = {*stored.about["blocks"], stored.about["state"]}
            given = dict(members(data))
            kept = {path.stem: path.read_bytes() for path in files(store.folder) if path.suffix == ".block"}
            assert {*kept} <= keys and len(keys) - len(kept) == missing
            assert all(entries(key, given[key]) == entries(key, own) for key, own in kept.items())
            if not crafted and not missing:
                assert check_whole(store, NAME, name) == TURNS[1]
            else:
                try:
                    stored.load(model(), "tokenizer")
                except SessionError as error:
                    assert len(str(error).splitlines()) == 1
        outcome = "imported"
    assert time.monotonic() - began < 10
    assert sorted(path for path in os.listdir(folder) if path != "store") == [one for one in others if one != "store"]
    return outcome


@pytest.mark.turns(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_changed_archives(change: str, count: int, exported: dict[str, bytes], tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        draw = random.Random(f"{change} {number}")
        name = draw.choice([*exported])
        data = CHANGES[change](exported[name], draw)
        try:
            seen[tried(data, tmp_path, change in ("block", "reference"), name)] += 1
        except BaseException:
            print(change, number, name)
            raise
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB
    print(seen)
    assert seen["imported" if change == "block" else "SessionDamaged"] > count // 5, seen


def test_the_archive_itself_is_imported(exported: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in exported.items():
        assert tried(data, tmp_path, False, name) == "imported"


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.GNUTYPE_SPARSE])
@pytest.mark.parametrize("size", [2**80, 2**63, 10 * 2**30])
def test_a_huge_size_takes_no_memory(size: int, kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("0" * 32)
    info.size, info.type = size, kind
    with open(tmp_path / "in.tar", "wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        if size < 2**40:
            file.truncate(512 + size)  # with a hole
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SessionDamaged, match="is damaged, or not a file of"):
        archive.add(tmp_path / "in.tar", Store(tmp_path / "store"), NAME)
    with open(tmp_path / "in.tar", "wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(SessionDamaged, match="is damaged, or not a file of"):
        archive.add(tmp_path / "in.tar", Store(tmp_path / "store"), NAME)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_what_is_no_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nothing")
    store = Store(tmp_path / "store")
    for place in ("pipe", ".", "link", "none", "pipe/none", "/dev/null", "/dev/zero"):
        with pytest.raises(SessionError, match="There is no file"):
            archive.add(tmp_path / place, store, NAME)
    (tmp_path / "closed").write_bytes(b"")
    opened = os.open

    def refuse(path: Any, *given: Any, **named: Any) -> int:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *given, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SessionError, match="cannot be read: permission denied"):
        archive.add(tmp_path / "closed", store, NAME)
    assert not store.folder.exists()


def test_a_file_that_changes_while_it_is_read_is_refused(
    exported: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the check, another session's blocks, which are whole, take the place of some."""
    source, store, found = tmp_path / "in.tar", Store(tmp_path / "store"), members(exported["kv-direct"])
    source.write_bytes(exported["kv-direct"])
    changed = block_changed(exported["kv-direct"], random.Random(1))
    assert len(changed) >= len(exported["kv-direct"]) - 10240 and found
    checked = archive._checked

    def and_changed(*given: Any) -> Any:
        result = checked(*given)
        source.write_bytes(changed)
        return result

    monkeypatch.setattr(archive, "_checked", and_changed)
    with pytest.raises(SessionError, match="changed while it was imported|is damaged"):
        archive.add(source, store, NAME)
    assert not [path for path in files(store.folder) if path.suffix in (".block", ".json")]
