"""Worker threads for what grows with a body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvkeep.native.library import trim_memory

T = TypeVar("T")
LARGE_BYTES = 64_000
"""Bytes of a body from which on it counts as large."""
_LARGE = ThreadPoolExecutor(1, thread_name_prefix="kvkeep-large")


async def in_worker(size: int, call: Callable[..., T], *given: Any) -> T:
    """Return the result of ``call``, run in a worker thread. size: bytes of the body that it works on. Work on large
    bodies runs one at a time, so that it takes the memory of one, and small ones do not wait for it."""
    if size < LARGE_BYTES:
        return await asyncio.to_thread(call, *given)
    return await asyncio.get_running_loop().run_in_executor(_LARGE, _trimmed, call, *given)


def _trimmed(call: Callable[..., T], *given: Any) -> T:
    """Return the result of ``call``. What it has freed goes back to the system, which other threads do not wait for."""
    try:
        return call(*given)
    finally:
        trim_memory()
