"""The memory of a process, as the system reports it in ``smaps_rollup``."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import KvkeepError
from kvkeep.native.library import trim_memory


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of a process in memory."""

    pss: int
    """Private memory, and this process's share of memory that other processes also map."""
    anonymous: int
    """Memory without a file."""
    mapped: int
    """Memory of mapped files: the model's and checkpoints'."""

    def __sub__(self, other: ProcessMemory) -> ProcessMemory:
        """Return the difference to ``other``."""
        return ProcessMemory(self.pss - other.pss, self.anonymous - other.anonymous, self.mapped - other.mapped)


def current_process_memory(rollup: Path = Path("/proc/self/smaps_rollup")) -> ProcessMemory:
    """Return the memory of this process, after returning freed memory to the system. Raises KvkeepError if the system
    does not report it."""
    gc.collect()
    trim_memory()
    try:
        return process_memory_of(rollup)
    except OSError as error:
        raise KvkeepError("The memory of a process can be measured on Linux only.") from error


def process_memory_of(rollup: Path) -> ProcessMemory:
    """Return a process's memory from its ``smaps_rollup``. Raises OSError if the file is missing."""
    lines = rollup.read_text().splitlines()[1:]
    size = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return ProcessMemory(size["Pss"], size["Anonymous"], size["Rss"] - size["Anonymous"])
