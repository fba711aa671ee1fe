"""Where results are kept: a file of lines that no kill can spoil (:mod:`~kvkeep_lab.lines`).

Who measures a cell holds that cell's lock; a process that dies lets go of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from kvkeep_lab import lines
from kvkeep_lab.experiment import Cell
from kvkeep_lab.tasks.base import Point


class Definition(BaseModel):
    """An experiment as it was when cells of ``setting`` were measured."""

    kind: Literal["experiment"] = "experiment"
    setting: str
    experiment: dict[str, Any]


class Record(BaseModel):
    """One cell, measured or failed. error: the sentence of one that failed. started: UTC. seconds: of the whole cell,
    with everything."""

    cell: str
    setting: str
    experiment: str
    model: str
    seed: int
    status: Literal["done", "failed"]
    error: str = ""
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    started: str = ""
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """What was measured, as a person reads it."""
        return self.model


class Row(Record):
    """One cell of a task.

    scores: each metric's number for every sample that it is about, in the samples' order. prompt_tokens, prefill_s,
    token_s (seconds of a token after the first): by sample, too. memory: bytes, of the sample that held most. entries:
    the budget of a full layer.
    """

    kind: Literal["cell"] = "cell"
    method: str
    budget: str | None
    point: Point
    scores: dict[str, list[float]] = {}
    prompt_tokens: list[int] = []
    prefill_s: list[float] = []
    token_s: list[float | None] = []
    memory: dict[str, Any] = {}
    exactness: str = ""
    entries: int | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or in a smaller form."""
        return int(self.memory.get("resident_bytes", 0)) + int(self.memory.get("compressed_bytes", 0))

    @property
    def label(self) -> str:
        """Method and budget."""
        return f"{self.method} at {self.budget}" if self.budget else self.method


class Finding(Record):
    """One cell of a study. data: what it found, as :meth:`~kvkeep_lab.studies.base.Study.plain` gives it."""

    kind: Literal["study"] = "study"
    data: Any = None


_RECORD: TypeAdapter[Definition | Row | Finding] = TypeAdapter(
    Annotated[Definition | Row | Finding, Field(discriminator="kind")]
)


class Store:
    """One file of results, and what was read of it so far. torn: lines that are no results."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.rows: list[Row] = []
        self.findings: list[Finding] = []
        self.definitions: list[Definition] = []
        self.torn = 0
        self._read = 0  # bytes

    def refresh(self) -> None:
        """Read what came since the last time; raises StoreError where the file cannot be read."""
        found, self._read = lines.whole(self.path, self._read)
        for line in found:
            try:
                record = _RECORD.validate_json(line)
            except ValidationError:
                self.torn += 1
                continue
            match record:
                case Row():
                    self.rows.append(record)
                case Finding():
                    self.findings.append(record)
                case Definition():
                    self.definitions.append(record)

    @property
    def unfinished(self) -> bool:
        """Whether the file ends in the middle of a line that nobody goes on with, as far as was read."""
        return self.path.exists() and self.path.stat().st_size > self._read

    def done(self) -> set[str]:
        """Return the keys of the cells that were measured, as far as was read."""
        return {record.cell for record in (*self.rows, *self.findings) if record.status == "done"}

    def append(self, record: Record | Definition) -> None:
        """Add one line; raises StoreError where there is no room for it."""
        lines.append(self.path, record.model_dump_json())

    def define(self, setting: str, experiment: dict[str, Any]) -> None:
        """Note what an experiment is, unless that was the last thing said of its setting."""
        said = [definition for definition in self.definitions if definition.setting == setting]
        if not said or said[-1].experiment != experiment:
            self.append(Definition(setting=setting, experiment=experiment))

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Hold a cell while the block runs, and tell whether it is ours: no other process measures it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{self.path}.{cell.key}.lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                yield False
                return
        except OSError as error:
            raise lines.unwritable(self.path, error) from error
        try:
            yield True
        finally:
            with suppress(OSError):  # where an open file cannot be removed, it stays: it is empty
                os.unlink(lock.lock_file)
            lock.release()
