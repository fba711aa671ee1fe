"""Where results are kept: a file of JSON lines that many processes may write to, and that no kill can spoil.

A line is appended by one write, flushed to the disk, while a lock is held. A line that a kill or a full disk left torn
is never read as a result, and the next one begins on a line of its own. Who measures a cell holds that cell's lock; a
process that dies lets go of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from kvkeep.errors import StoreError
from kvkeep.lab.experiment import Cell
from kvkeep.lab.tasks.base import Point


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
    """One cell of a study. data: what it found, as :meth:`~kvkeep.lab.studies.base.Study.plain` gives it."""

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
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"The results '{self.path}' cannot be read: {_reason(error)}.") from error
        whole = data[: data.rfind(b"\n") + 1]  # what follows may still be on its way
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                record = _RECORD.validate_json(line)
            except ValidationError:
                self.torn += bool(line.strip())
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
        """Add one line, whole or not at all for whoever reads; raises StoreError where there is no room for it."""
        line = record.model_dump_json().encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock"):
                file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    if _ends_torn(file):
                        line = b"\n" + line
                    if os.write(file, line) < len(line):
                        raise OSError(0, "no space left on device")
                    os.fsync(file)
                finally:
                    os.close(file)
        except OSError as error:
            raise StoreError(f"The results '{self.path}' cannot be written: {_reason(error)}.") from error

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
            raise StoreError(f"The results '{self.path}' cannot be written: {_reason(error)}.") from error
        try:
            yield True
        finally:
            with suppress(OSError):  # where an open file cannot be removed, it stays: it is empty
                os.unlink(lock.lock_file)
            lock.release()


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    if not size:
        return False
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) != b"\n"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
