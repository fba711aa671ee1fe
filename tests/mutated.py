"""Models with damaged files, each drawn from a seed, and what becomes of them in a process of their own."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvkeep import KeepCache
from kvkeep.decode.generate import generate
from kvkeep.decode.prompt import encode
from kvkeep.errors import KvkeepError
from kvkeep.models.loading import load

SECONDS, BYTES = 10, 2_000_000_000
"""Processor time and memory of a process, beside what it has when it begins."""
NUMBERS = (0, 1, 2, 3, 127, 255, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *NUMBERS, -1, -(2**40), 10**9, 0.5, 1e308, -0.0, float("nan"), float("inf"), "", "x", "é" * 99, "../../x", True,
    False, None, [], {}, [0], [[]], [2**31] * 9, {"a": 1}, "x" * 100_000, [1] * 100_000,
)  # fmt: skip
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def ended(run: Callable[[], object], seconds: int = SECONDS, more: int = BYTES) -> str:
    """How ``run`` ended in a forked process: what it returned, its one sentence, or what was wrong."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(6 * seconds)
            try:
                said = f"answer: {run()}"
            except KvkeepError as error:
                whole = str(error)
                one = whole.endswith(".") and "\n" not in whole and len(whole) < 1000
                said = f"error: {whole}" if one else f"no sentence: {whole[:300]!r}"
            except BaseException:
                said = f"traceback: {traceback.format_exc()[-1500:]}"
            os.write(write, said.encode("utf-8", "replace")[:60_000])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return said or f"signal {status & 127}"


def answered(place: Path) -> str:
    """The answer of the model at ``place`` to a short question."""
    loaded = load(place, device="cpu")
    ids = encode(loaded.tokenizer, [{"role": "user", "content": "a b the"}])
    made = generate(loaded.model, loaded.tokenizer, ids, KeepCache(loaded.model, "full"), max_new_tokens=4)
    return made.text


def gguf_fields(data: bytes) -> tuple[list[tuple[int, int]], int]:
    """The place and the size of each number in a header (counts, lengths, types, values), and the header's end."""
    found, at = [(4, 4), (8, 8), (16, 8)], 24
    tensors, keys = struct.unpack_from("<QQ", data, 8)

    def take(size: int) -> int:
        nonlocal at
        found.append((at, size))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def text() -> None:
        nonlocal at
        length = take(8)
        at += length

    def value(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = take(4), take(8)
            for _ in range(count):
                value(inner)
        else:
            take(_SIZES[kind])

    for _ in range(keys):
        text()
        value(take(4))
    for _ in range(tensors):
        text()
        for _ in range(take(4)):
            take(8)
        take(4)
        take(8)
    return found, at


def damaged_gguf(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """A file of a model with one damage, and its name."""
    fields, end = gguf_fields(data)
    made = bytearray(data)
    kind = draw.choice(("number",) * 6 + ("header", "header", "data", "cut", "more", "swap", "nan", "zeros"))
    if kind == "number":
        place, size = draw.choice(fields)
        old = int.from_bytes(data[place : place + size], "little")
        new = draw.choice((*NUMBERS, old + 1, old - 1, 2 * old, draw.getrandbits(64))) % (1 << 8 * size)
        made[place : place + size] = new.to_bytes(size, "little")
    elif kind in ("header", "data"):
        low, high = (0, end) if kind == "header" else (end, len(data))
        for _ in range(draw.choice((1, 1, 3, 20))):
            made[draw.randrange(low, high)] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del made[draw.randrange(len(made)) :]
    elif kind == "more":
        made += draw.randbytes(draw.choice((1, 31, 4096)))
    elif kind == "swap":
        one, other = (draw.choice([field for field in fields if field[1] == 8]) for _ in range(2))
        first, second = (bytes(made[at : at + 8]) for at, _ in (one, other))
        made[one[0] : one[0] + 8], made[other[0] : other[0] + 8] = second, first
    else:
        start = draw.randrange(end, len(data) - 64) // 32 * 32
        value = {"nan": b"\xff\xff\xff\x7f", "zeros": b"\0\0\0\0"}[kind]
        count = draw.choice((1, 16, (len(data) - start) // 4))
        made[start : start + 4 * count] = value * count
    return kind, bytes(made)


def damaged_folder(source: Path, target: Path, draw: random.Random) -> str:
    """Copies a model's folder with one damage; returns its name."""
    shutil.copytree(source, target)
    name = draw.choice(sorted(path.name for path in target.iterdir()))
    path = target / name
    kind = draw.choice(("json",) * 8 + ("bytes", "cut", "gone", "folder", "pipe", "empty", "link", "deep", "foreign"))
    if name.endswith(".safetensors") and kind in ("json", "deep"):
        path.write_bytes(_damaged_safetensors(path.read_bytes(), draw))
    elif kind == "json" and name.endswith(".json"):
        path.write_text(json.dumps(_changed(json.loads(path.read_text()), draw)))
    elif kind == "deep" and name.endswith(".json"):
        path.write_text("[" * 100_000 if draw.random() < 0.5 else '{"a":' * 100_000)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: draw.randrange(1 + path.stat().st_size)])
    elif kind in ("gone", "folder", "pipe", "link"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "foreign":
        path.write_bytes(draw.randbytes(1000))
    else:
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice((1, 3, 20))):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    return f"{kind} {name}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _places(one, (*path, key))


def _changed(value: Any, draw: random.Random) -> Any:
    """A JSON value with another part, or without one."""
    found = [one for one in _places(value) if one]
    *above, last = draw.choice(found)
    holder = value
    for key in above:
        holder = holder[key]
    if draw.random() < 0.15:
        del holder[last]
    else:
        holder[last] = draw.choice(VALUES)
    return value


def _damaged_safetensors(data: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header, rest = data[8 : 8 + length], data[8 + length :]
    if draw.random() < 0.3:
        return struct.pack("<Q", draw.choice(NUMBERS)) + header + rest
    if draw.random() < 0.3:
        start = draw.randrange(len(rest)) // 4 * 4
        return (
            data[:8]
            + header
            + rest[:start]
            + b"\xff\xff\xff\x7f" * ((len(rest) - start) // 4)
            + rest[len(rest) // 4 * 4 :]
        )
    made = json.dumps(_changed(json.loads(header), draw)).encode()
    return struct.pack("<Q", len(made)) + made + rest
