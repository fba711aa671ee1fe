"""A job that measures nothing: processes that work on it import neither torch nor a model."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep_lab.store import ResultFile, StudyRecord
from kvkeep_lab.workers import WorkerJob, work_in_processes

from kvkeep.errors import ModelError


@dataclass(frozen=True)
class StandIn:
    """A cell whose key says what happens when it is measured; ``seed`` tells its group."""

    key: str
    seed: int = 0
    model: str = "m"
    point: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.key


@dataclass
class Measures:
    """folder: for a file of each cell, with the process that measured it last."""

    folder: Path
    sources: Sequence[Path] = ()
    device: str | None = None
    workers: int = 1
    notify: Any = None

    def measure(self, cell: Any, step: Any = None) -> StudyRecord:
        known = (self.folder / cell.key).exists()
        (self.folder / cell.key).write_text(f"{os.getpid()}")
        if cell.key == "kills always" or (cell.key == "kills once" and not known):
            os.kill(os.getpid(), signal.SIGKILL)
        if cell.key == "raises":
            raise ModelError("There is no such model.")
        if cell.key == "breaks":
            raise ZeroDivisionError("by zero")
        if cell.key.startswith("meets"):
            last = time.monotonic() + 60
            while len(list(self.folder.glob("meets*"))) < 2 and time.monotonic() < last:
                time.sleep(0.05)
        time.sleep(600 if cell.key.startswith("hangs") else 0.05)
        return self._record(cell, status="done", machine={"process": os.getpid(), "workers": self.workers})

    def lost(self, cell: Any) -> StudyRecord:
        return self._record(cell, status="failed", error="lost")

    def _record(self, cell: Any, **found: Any) -> StudyRecord:
        return StudyRecord(cell=cell.key, setting="s", experiment="e", model=cell.model, seed=cell.seed, **found)


def job(folder: Path, cells: Sequence[StandIn], workers: int = 2, make: Any = None) -> WorkerJob:
    folder.mkdir(exist_ok=True)
    some: Any = tuple(cells)
    return WorkerJob(make or partial(Measures, folder), (), some, workers=workers)


def main(folder: str, workers: int = 2) -> None:
    """Measure what hangs, until somebody ends it."""
    cells = [StandIn("quick"), StandIn("hangs"), StandIn("hangs too", 1)]
    work_in_processes(job(Path(folder), cells, workers), ResultFile(Path(folder) / "r.jsonl"), lambda: None)


if __name__ == "__main__":
    main(sys.argv[1])
