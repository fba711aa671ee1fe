"""Importing any file gives the session that its blocks describe, or one sentence, and writes only into the store."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import resource
import shutil
import struct
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
from kvkeep.blocks.folder import HEADER, checksum, described, parse
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
        assert archive.export(Store(folder / name), NAME, folder / f"{name}.session-file") == 0
        made[name] = (folder / f"{name}.session-file").read_bytes()
    return made


def members(data: bytes) -> Members:
    """The reference, which has no name, and the blocks of a file."""
    file, (_, count) = io.BytesIO(data[:-32]), archive.HEAD.unpack_from(data)
    file.seek(archive.HEAD.size)
    found = [("", file.read(count))]
    while (place := file.tell()) < len(data) - 32:
        name, length = described(file)
        file.seek(place)
        found.append((name, file.read(length)))
    return found


def packed(content: Members, magic: bytes = archive.MAGIC) -> bytes:
    """The file of such members."""
    own = [one for _, one in content]
    data = archive.HEAD.pack(magic, len(own[0]) if own else 0) + b"".join(own)
    return data + blake2b(data, digest_size=32).digest()


def block_changed(data: bytes, draw: random.Random) -> bytes:
    """Change a block's bytes or description, and its checksums."""
    found = members(data)
    number = draw.randrange(1, len(found))
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
    header, _ = decode(found[0][1])
    if draw.random() < 0.1:
        depth = draw.choice((100, 900, 990, 100_000))
        text = json.dumps(header | {"about": 0})
        inner = json.dumps(header["about"] | {"notes": 0})
        inner = inner.replace('"notes": 0', '"notes": {"x":' + "[" * depth + "]" * depth + "}")
        return packed([("", sealed(text.replace('"about": 0', f'"about": {inner}').encode())), *found[1:]])
    return packed([("", encode(json_changed(header, draw))), *found[1:]])


def sealed(data: bytes) -> bytes:
    return data + b"\n" + blake2b(data, digest_size=16).hexdigest().encode()


def extended(data: bytes, draw: random.Random) -> bytes:
    """Other members, in another order, or packed otherwise; the digest is right."""
    found = members(data)
    at = draw.randrange(1, len(found))
    kinds: dict[str, Callable[[], bytes]] = {
        "something between": lambda: packed([*found[:at], ("", b"x" * draw.choice((1, 64, 10**6))), *found[at:]]),
        "twice": lambda: packed([("", data), ("", data)]),
        "again": lambda: packed([*found[:at], found[at - 1], *found[at:]]),
        "no reference": lambda: packed(found[1:]),
        "nothing": lambda: packed([]),
        "without a block": lambda: packed([*found[:at], *found[at + 1 :]]),
        "other order": lambda: packed([found[0], *reversed(found[1:])]),
        "a huge reference": lambda: data[:8] + struct.pack("<Q", draw.choice((2**40, 2**63))) + data[16:],
        "another version": lambda: packed(found, b"kvsess99"),
        "gzip": lambda: gzip.compress(data, 1),
        "longer": lambda: data + bytes(draw.choice((1, 512, 10240, 10**6))),
        "another name": lambda: packed(
            [*found[:at], (found[at][0], found[at][1].replace(b"0", b"1", 1)), *found[at + 1 :]]
        ),
    }
    return kinds[draw.choice([*kinds])]()


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


CASES = 24
CHANGES = {
    "bytes": bytes_changed,
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
    source, store = folder / "in", Store(folder / "store", quota=None)
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
            given = dict(members(data)[1:])
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
def test_changed_archives(change: str, exported: dict[str, bytes], tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(CASES):
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
    assert seen["imported" if change == "block" else "SessionDamaged"] > CASES // 5, seen


def test_the_archive_itself_is_imported(exported: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in exported.items():
        assert tried(data, tmp_path, False, name) == "imported"


def test_a_huge_size_takes_no_memory(tmp_path: Path) -> None:
    source, before = tmp_path / "in", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for head in (b"", archive.HEAD.pack(archive.MAGIC, 2**33), HEADER.pack(b"kvblock3", 2**32 - 1, 0)):
        with open(source, "wb") as file:
            file.write(head)
            file.truncate(10 * 2**30)  # with a hole
        with pytest.raises(SessionDamaged, match="is damaged, or not a file of"):
            archive.add(source, Store(tmp_path / "store"), NAME)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_what_is_no_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nothing")
    store = Store(tmp_path / "store")
    for place in ("pipe", ".", "link", "none", "pipe/none", "/dev/null", "/dev/zero"):
        with pytest.raises(SessionError, match="There is no file"):
            archive.add(tmp_path / place, store, NAME)
    (tmp_path / "closed").write_bytes(b"")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SessionError, match="cannot be read: permission denied"):
        archive.add(tmp_path / "closed", store, NAME)
    assert not store.folder.exists()
