"""Lists running processes from /proc; zombies do not count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def living() -> set[int]:
    """Return all processes."""
    return {process for process, _, _ in _living()}


def in_group(group: int) -> set[int]:
    """Return the processes of a process group."""
    return {process for process, _, its in _living() if its == group}


def descendants(process: int) -> set[int]:
    """Return a process's children, their children, and so on."""
    parents = {child: parent for child, parent, _ in _living()}
    found, more = set[int](), {process}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for something to be true."""
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.05)


def _living() -> Iterator[tuple[int, int, int]]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, parent, group = file.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                yield int(file.parent.name), int(parent), int(group)
