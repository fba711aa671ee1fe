"""Cells and desks that measure nothing: processes that use them import neither torch nor a model."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeep_lab.workers import local_workers, measured

from kvkeep.errors import ModelError


@dataclass(frozen=True)
class StandIn:
    """A cell whose key says what happens when it is measured; ``seed`` tells its group."""

    key: str
    seed: int = 0
    model: str = "m"
    point: dict[str, Any] = field(default_factory=dict)


@dataclass
class Desk:
    """folder: for marks of what happened."""

    folder: Path
    device: str | None = None
    workers: int = 1

    def measure(self, cell: StandIn, step: Any = None) -> dict[str, Any]:
        mark = self.folder / cell.key
        known = mark.exists()
        mark.touch()
        if cell.key == "kills always" or (cell.key == "kills once" and not known):
            os.kill(os.getpid(), signal.SIGKILL)
        if cell.key == "raises":
            raise ModelError("There is no such model.")
        if cell.key.startswith("hangs"):
            time.sleep(600)
        return {"cell": cell.key, "process": os.getpid(), "workers": self.workers}


@contextmanager
def yes(cell: StandIn) -> Any:
    yield True


class Makes:
    """What makes desks: :func:`functools.partial` of a class, but one that nothing else shares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, **options: Any) -> Desk:
        return Desk(self.folder, **options)


def main(folder: str) -> None:
    """Measure what hangs, until somebody ends it."""
    cells = [StandIn("quick"), StandIn("hangs"), StandIn("hangs too")]
    with local_workers(Makes(Path(folder)), None, 2) as workers:
        for cell, _ in measured(workers, cells, yes, dict):
            print(cell.key, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
