"""The store: a file of JSON lines, one for each cell, and claims of cells by workers.

A line is appended by one write, flushed to the disk, while a lock is held; what a kill or a full disk left torn stays
a line of its own. A cell is measured under a lock file, which the operating system releases when its process dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from kvkeep.errors import StoreError

if TYPE_CHECKING:
    from kvkeep_lab.cell import Cell


class Definition(BaseModel):
    """An experiment as it was when cells of ``setting`` were measured."""

    kind: Literal["experiment"] = "experiment"
    setting: str
    experiment: dict[str, Any]


class Record(BaseModel):
    """One cell, measured or failed. error: why it failed, in a sentence. started: UTC. seconds: the whole cell's."""

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


class TaskRecord(Record):
    """One cell of a task.

    scores: for each metric, the number of every sample that has one, in the samples' order. prompt_tokens, prefill_s,
    token_s (seconds for each token after the first): by sample, too. memory: bytes, of the sample that held most;
    whole_bytes: of an unbounded bfloat16 cache for that one, 0 in stores of earlier versions. entries: the budget of a
    full layer.
    """

    kind: Literal["cell"] = "cell"
    method: str
    budget: str | None
    point: dict[str, int | float | str]
    scores: dict[str, list[float]] = {}
    prompt_tokens: list[int] = []
    prefill_s: list[float] = []
    token_s: list[float | None] = []
    memory: dict[str, Any] = {}
    whole_bytes: int = 0
    exactness: str = ""
    entries: int | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or compressed."""
        return int(self.memory.get("resident_bytes", 0)) + int(self.memory.get("compressed_bytes", 0))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of checkpoints, wherever they are."""
        return sum(self.memory.get("checkpoint_bytes", {}).values())

    @property
    def label(self) -> str:
        """Method and budget."""
        return f"{self.method} at {self.budget}" if self.budget else self.method


class StudyRecord(Record):
    """One cell of a study. data: what it found, as :meth:`~kvkeep_lab.studies.base.Study.plain` returns it."""

    kind: Literal["study"] = "study"
    data: Any = None


_LINE: TypeAdapter[Definition | TaskRecord | StudyRecord] = TypeAdapter(
    Annotated[Definition | TaskRecord | StudyRecord, Field(discriminator="kind")]
)


class Store:
    """One file of results, and what was read of it so far. start: the byte that reading begins at, the beginning of a
    line. torn: lines that are no results."""

    def __init__(self, path: str | os.PathLike[str], start: int = 0) -> None:
        self.path = Path(path)
        self.start = self.end = start  # end: the byte after the last whole line that was read
        self.records: list[TaskRecord | StudyRecord] = []
        self.definitions: list[Definition] = []
        self.torn = 0
        self._locks: dict[int, tuple[Cell, FileLock]] = {}  # by worker

    def refresh(self) -> None:
        """Read what was added since the last time; raises StoreError where the file cannot be read."""
        found, self.end = whole_lines(self.path, self.end)
        for line in found:
            try:
                record = _LINE.validate_json(line)
            except ValidationError:
                self.torn += 1
                continue
            if isinstance(record, Definition):
                self.definitions.append(record)
            else:
                self.records.append(record)

    @property
    def unfinished(self) -> bool:
        """Whether the file, as far as it was read, ends within a line that no process goes on with."""
        return self.path.exists() and self.path.stat().st_size > self.end

    def done(self) -> set[str]:
        """Return the keys of the cells that were measured, as far as the file was read."""
        return {record.cell for record in self.records if record.status == "done"}

    def append(self, record: Record | Definition) -> None:
        """Add one line; raises StoreError where it cannot be written."""
        append_line(self.path, record.model_dump_json())

    def define(self, setting: str, experiment: dict[str, Any]) -> None:
        """Add what an experiment is, unless the last definition of its setting is the same."""
        known = [definition for definition in self.definitions if definition.setting == setting]
        if not known or known[-1].experiment != experiment:
            self.append(Definition(setting=setting, experiment=experiment))

    def claim(self, cell: Cell, worker: int = 0) -> int:
        """Lock a cell for a worker, and return how many have begun it, this one included: others have died of it where
        that is more than one. Return 0 where it is not free: another process is measuring it, or there is a record of
        it beyond ``start``. What the worker holds already, it has died of. Raises StoreError."""
        if worker in self._locks:
            self._locks.pop(worker)[1].release()
        if (lock := self._locked(cell)) is None:
            return 0
        self.refresh()
        if cell.key in {record.cell for record in self.records}:
            self._free(cell, lock)
            return 0
        self._locks[worker] = cell, lock
        with self._writing(), self._begun(cell).open("ab") as file:
            file.write(b".")
            return file.tell()

    def release(self, worker: int = 0) -> None:
        """Free what a worker holds; one that dies never comes to this."""
        if worker in self._locks:
            self._free(*self._locks.pop(worker))

    def forget(self, cells: Iterable[Cell]) -> None:
        """Forget that cells were begun, except those that are being measured: their workers were ended on purpose."""
        for cell in cells:  # a worker killed before it began one leaves the lock's file
            left = self._begun(cell).exists() or self._lock_file(cell).exists()
            if left and (lock := self._locked(cell)) is not None:
                self._free(cell, lock)

    def _begun(self, cell: Cell) -> Path:
        """A byte for each worker that has begun the cell and not come to its end."""
        return Path(f"{self.path}.{cell.key}.begun")

    def _lock_file(self, cell: Cell) -> Path:
        return Path(f"{self.path}.{cell.key}.lock")

    def _locked(self, cell: Cell) -> FileLock | None:
        lock = FileLock(self._lock_file(cell), timeout=0)
        with self._writing(), suppress(Timeout):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            return lock
        return None

    def _free(self, cell: Cell, lock: FileLock) -> None:
        with suppress(OSError):  # Windows removes no open file; an empty one stays there
            self._begun(cell).unlink(missing_ok=True)
            os.unlink(lock.lock_file)
        lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Timeout:  # an OSError, and no fault of the disk
            raise
        except OSError as error:
            raise _unwritable(self.path, error) from error


def append_line(path: Path, line: str) -> None:
    """Append one line atomically; raises StoreError if there is no room."""
    data = line.encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if _ends_torn(file):
                    data = b"\n" + data
                if os.write(file, data) < len(data):
                    raise OSError(0, "no space left on device")
                os.fsync(file)
            finally:
                os.close(file)
    except OSError as error:
        raise _unwritable(path, error) from error


def whole_lines(path: Path, start: int = 0) -> tuple[list[bytes], int]:
    """Return the whole lines from byte ``start`` on that are not empty, and where the next one begins; none of a file
    that does not exist. Raises StoreError where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    except OSError as error:
        raise StoreError(f"The results '{path}' cannot be read: {_reason(error)}.") from error
    data = data[: data.rfind(b"\n") + 1]  # what follows may still be on its way
    return [line for line in data.splitlines() if line.strip()], start + len(data)


def _unwritable(path: Path, error: OSError) -> StoreError:
    """Return what to raise where ``path`` cannot be written."""
    return StoreError(f"The results '{path}' cannot be written: {_reason(error)}.")


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    if not size:
        return False
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) != b"\n"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
