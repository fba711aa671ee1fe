"""Worker threads for what grows with a body."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvkeep.native.library import trim_memory

T = TypeVar("T")
LARGE_BYTES = 64_000
"""Bytes of a body from which on it counts as large."""
WORKERS = 6
"""Threads for all other work."""
_large = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-large")


def start_workers() -> None:
    """Start all worker threads of the running event loop. Later, when memory is short, a thread may end before it has
    begun, and Python waits for it without end."""
    global _large
    _large = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-large")  # a forked process has no threads
    others = ThreadPoolExecutor(WORKERS, thread_name_prefix="kvkeep-worker")
    for pool, count in ((_large, 1), (others, WORKERS)):
        all_there = threading.Barrier(count + 1)
        try:
            for _ in range(count):
                pool.submit(all_there.wait)
        except BaseException:  # a thread cannot be started: at its end, the process waits for the others
            all_there.abort()
            raise
        all_there.wait()
    asyncio.get_running_loop().set_default_executor(others)


async def in_worker(size: int, call: Callable[..., T], *given: Any) -> T:
    """Return the result of ``call``, run in a worker thread. size: bytes of the body that it works on. Work on large
    bodies runs one at a time, so that it takes the memory of one, and small ones do not wait for it."""
    if size < LARGE_BYTES:
        return await asyncio.to_thread(call, *given)
    return await asyncio.get_running_loop().run_in_executor(_large, _trimmed, call, *given)


def _trimmed(call: Callable[..., T], *given: Any) -> T:
    """Return the result of ``call``. What it has freed goes back to the system, which other threads do not wait for."""
    try:
        return call(*given)
    finally:
        trim_memory()
