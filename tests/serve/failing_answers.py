"""A program: answers of an engine while allocations fail, one after the other.

``python failing_answers.py MODEL STORES BYTES STRIDE COUNT`` with the library of fixtures/failing_memory.c preloaded.
Of the allocations of at least BYTES in a round of answers it lets the first fail, then the one STRIDE further on, and
so on, each time COUNT one after the other. Prints a line of JSON: how many failed, how the answers ended, and what was
wrong.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from answering import Client, text

from kvkeep.blocks.store import Store
from kvkeep.errors import OutOfMemory
from kvkeep.models.loading import Loaded, load
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import Finished

KINDS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "h2o", "budget": 24, "chunk": 16},
    {"method": "kv-direct", "budget": 24},
    {"method": "snapkv+verified", "budget": 24, "chunk": 16},
    {"method": "full"},
]
LENGTHS = (700, 90, 60, 120, 40)
"""Tokens of the prompts; the first fills a block of the store."""
NEW = 12


def main(folder: str, stores: str, least: int, stride: int, count: int) -> dict[str, Any]:
    shim = ctypes.CDLL(None)
    loaded = load(folder, weights="bfloat16", device="cpu")
    fails = shim.memory_fails
    fails.argtypes = [ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
    wanted = answers(loaded, Path(stores, "wanted"), lambda: None)
    assert all(isinstance(one, tuple) for one in wanted), wanted
    found, wrong, failed = Counter[str](), list[str](), 0
    for number in itertools.count(0):
        begin, folder = partial(fails, least, number * stride, count), Path(stores, str(number))
        ended = answers(loaded, folder, begin, partial(fails, 2**62, 0, 0))
        if shim.memory_failed() == failed:  # all were passed
            break
        failed = shim.memory_failed()
        for one, right in zip(ended, wanted * 2, strict=True):
            kind = "answered" if one == right else "refused" if "memory" in str(one) else "wrong"
            found[kind] += 1
            if kind == "wrong":
                wrong.append(f"after {number * stride}: {one}")
        if any(one != right for one, right in zip(ended[len(KINDS) :], wanted, strict=True)):
            wrong.append(f"after {number * stride}, later: {ended[len(KINDS) :]}")
    return {"rounds": number, "failed": failed, **found, "wrong": wrong[:5]}


def answers(loaded: Loaded, store: Path, arm: Any, disarm: Any = None) -> list[Any]:
    """The tokens of each answer, or its error; with ``disarm`` those of a second round as well."""
    engine = Engine(loaded, 10**9, store=Store(store))
    engine.start()
    try:
        ended = asked(engine, arm)
        if disarm is None:
            return ended
        disarm()
        return ended + asked(engine, lambda: None)
    finally:
        engine.stop(5)
        engine.join()


def asked(engine: Engine, arm: Any) -> list[Any]:
    clients = [
        Client(engine, text(length, seed), NEW, name=("me", str(seed)) if seed < 4 else None, **kind)
        for seed, (kind, length) in enumerate(zip(KINDS, LENGTHS, strict=True))
    ]
    arm()
    deadline = time.monotonic() + 60
    while not all(client.done for client in clients):
        if time.monotonic() > deadline:
            return ["it hangs"] * len(KINDS)
        time.sleep(0.002)
    return [last(client.events[-1]) for client in clients]


def last(event: Any) -> Any:
    if isinstance(event, Finished):
        return event.tokens
    return str(event) if isinstance(event, OutOfMemory) else f"{type(event).__name__}: {event}"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
