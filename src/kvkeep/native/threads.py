"""Threads of torch, no more than the system allows: OpenMP ends the process where it cannot start one."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from kvkeep.native.room import has_room

log = logging.getLogger(__name__)

THREAD_BYTES = 24 << 20
"""What a thread takes: its stack (8 MB), and what libraries allocate as it begins, without which they end the
process."""


def limit_threads() -> None:
    """Let torch use only as many threads as can be started, for the calling thread. OpenMP starts them at once and
    keeps them, so that later there is no thread to start."""
    import torch

    wanted = torch.get_num_threads()
    if (count := 1 + _startable(wanted - 1)) < wanted:
        log.warning("Of %d threads only %d can be started (ulimit -u, -v): kvkeep continues with these.", wanted, count)
    torch.set_num_threads(count)  # also of OpenMP, for a thread that has not used torch yet
    begin_thread()
    with suppress(RuntimeError, MemoryError):
        torch.zeros(count << 16).neg_()  # large enough for all threads


def begin_thread() -> None:
    """Use torch in a new thread. What its libraries keep for each thread is allocated at the first use, and the system
    ends a process that finds no memory for that: better here than under load."""
    import torch

    with suppress(RuntimeError, MemoryError):
        torch.zeros(8).bfloat16().float().sum().item()


def _startable(count: int) -> int:
    """Return how many of ``count`` threads can run at the same time beside this one."""
    while count and not has_room(count * THREAD_BYTES):
        count -= 1
    ended, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=ended.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        pass
    finally:
        ended.set()
        for thread in started:
            thread.join()
    return len(started)
